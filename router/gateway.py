"""Puts the gateway together: one aiohttp application, the scheduler, and what feeds it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web
from msgspec.structs import replace

from policies.types import Policy
from prfaas.clock import WallClock
from prfaas.config import Config
from router import completions, debug, models, tokenization
from router.admission import Admission
from router.auth import auth_middleware
from router.backends.native import NativeBackend
from router.brain import Brain
from router.calibration import Calibration
from router.context import GATEWAY, Gateway
from router.core.config import SchedulerConfig
from router.core.events import LinkConfigured, Tick
from router.core.journal import JournalHeader
from router.core.policy_loader import load_policy
from router.core.scheduler import Scheduler
from router.core_metrics import SchedulerCollector
from router.decision_log import DecisionLog
from router.dispatch import Dispatcher
from router.errors import error_middleware
from router.journal_file import JournalFile
from router.metrics import GatewayMetrics
from router.prompts import PromptPipeline, TextModel
from router.trace import Recorder
from router.workers import Workers

logger = logging.getLogger(__name__)
TICK_S = 1.0
EXECUTOR_THREADS = 2
"""For long renderings and hashes only."""


def create_app(config: Config, model: TextModel) -> web.Application:
    """The gateway's application; its start-up context connects to the workers.

    Raises:
        ConfigError: the policy cannot be loaded.
    """
    app = web.Application(
        client_max_size=int(config.gateway.max_body),
        middlewares=[error_middleware, auth_middleware(config.auth.client_tokens)],
    )
    for routes in (completions, models, tokenization, debug):
        routes.add_routes(app)
    policy = load_policy(config.policy.name, config.policy.parameters)
    app.cleanup_ctx.append(partial(_life, config, model, policy))
    return app


async def _life(
    config: Config, model: TextModel, policy: Policy, app: web.Application
) -> AsyncIterator[None]:
    """The application's life: everything made here ends here."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(_client_session(config))
        journal = _journal(config)
        stack.callback(journal.close)
        brain = Brain(_scheduler(config, policy, journal), WallClock())
        configure_links(brain, config)
        log = DecisionLog(config.gateway.decision_log)
        stack.callback(log.close)
        executor = ThreadPoolExecutor(EXECUTOR_THREADS, thread_name_prefix="prompts")
        stack.callback(executor.shutdown, wait=False, cancel_futures=True)
        gateway = build_gateway(config, model, brain, session, log, executor)
        app[GATEWAY] = gateway
        calibration = Calibration(gateway, session)
        gateway.workers.start()
        stack.push_async_callback(gateway.workers.stop)
        stack.push_async_callback(calibration.stop)
        tasks = [
            asyncio.create_task(_open_for_requests(calibration, gateway.admission)),
            asyncio.create_task(_tick(brain, journal)),
        ]
        stack.push_async_callback(_cancel, tasks)
        yield


def build_gateway(
    config: Config,
    model: TextModel,
    brain: Brain,
    session: ClientSession,
    log: DecisionLog,
    executor: Executor,
) -> Gateway:
    """The parts that routes use, wired together; nothing runs yet."""
    metrics = GatewayMetrics()
    admission = Admission(config.gateway.max_inflight, metrics)
    metrics.add_collector(SchedulerCollector(brain.scheduler, admission))
    workers = Workers(config, session, brain, metrics)
    page_size = fleet_page_size(config)
    recorder = Recorder(config, log, metrics, brain.now, page_size)
    brain.scheduler.on_outcome = recorder.outcome
    return Gateway(
        config=config,
        model=model,
        prompts=PromptPipeline(model, page_size, executor),
        brain=brain,
        workers=workers,
        dispatcher=Dispatcher(
            brain, workers, NativeBackend(session), metrics, config.gateway, config.timeouts
        ),
        recorder=recorder,
        metrics=metrics,
        admission=admission,
        started_unix_s=int(time.time()),
    )


def _journal(config: Config) -> JournalFile:
    header = JournalHeader(
        seed=config.gateway.seed,
        policy=config.policy.name,
        parameters=dict(config.policy.parameters),
        config=scheduler_config(config),
    )
    return JournalFile(config.gateway.journal, header)


def scheduler_config(config: Config) -> SchedulerConfig:
    """The cost model's defaults; a booking has not leaked as long as its request may run."""
    defaults = SchedulerConfig()
    deadline_s = max(defaults.booking_deadline_s, 1.5 * config.timeouts.request)
    return replace(defaults, booking_deadline_s=deadline_s)


def _scheduler(config: Config, policy: Policy, journal: JournalFile) -> Scheduler:
    return Scheduler(
        policy,
        seed=config.gateway.seed,
        config=scheduler_config(config),
        policy_name=config.policy.name,
        record=journal.record,
        timer=time.perf_counter,
        policy_budget_s=float(config.policy.time_budget),
    )


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _open_for_requests(calibration: Calibration, admission: Admission) -> None:
    try:
        await calibration.run()
    except Exception:
        # Uncalibrated service is better than none; the default profiles say so in the metrics.
        logger.exception("event=calibration_aborted")
    admission.started = True


async def _tick(brain: Brain, journal: JournalFile) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        try:
            brain.apply(Tick(now_s=brain.now()))
        except Exception:
            # Without ticks leaked bookings would stay and estimates never age: the next one may succeed.
            logger.exception("event=tick_failed")
        journal.flush()


def configure_links(brain: Brain, config: Config) -> None:
    """Tell the scheduler of every configured link."""
    for name, link in config.links.items():
        brain.apply(
            LinkConfigured(
                name=name,
                clusters=link.between,
                capacity_bytes_per_s=float(link.capacity),
                rtt_s=float(link.rtt),
                now_s=brain.now(),
            )
        )


def fleet_page_size(config: Config) -> int:
    """Tokens per page, which all workers share (`prfaas.config_check` refuses other fleets)."""
    sizes = [worker.page_size for cluster in config.clusters.values() for worker in cluster.workers.values()]
    return sizes[0]


def _client_session(config: Config) -> ClientSession:
    """One pool of connections to the workers, without a limit: streams live as long as answers."""
    token = config.auth.service_token
    return ClientSession(
        connector=TCPConnector(limit=0),
        timeout=ClientTimeout(total=None, sock_connect=float(config.timeouts.connect)),
        headers={"Authorization": f"Bearer {token}"} if token else None,
        auto_decompress=False,
        read_bufsize=2**18,
    )
