"""The gateway as a process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from pathlib import Path

from aiohttp import web

from prfaas.config import Config
from router.bodies import SERVER_OPTIONS
from router.context import GATEWAY
from router.gateway import create_app
from router.text_model import HFTextModel

logger = logging.getLogger(__name__)
_CLOSE_S = 2.0
"""After draining: how long handlers may take to notice that they are cancelled."""


def run_gateway(config: Config) -> None:
    """Serve until SIGTERM or SIGINT, then drain.

    Raises:
        ConfigError: the model folder or the policy cannot be used.
        OSError: the port is taken.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(serve(config))


async def serve(config: Config) -> None:
    """Serve in the running loop until told to stop."""
    name = config.model.name or Path(config.model.path).name
    app = create_app(config, HFTextModel(Path(config.model.path), name))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_S, **SERVER_OPTIONS)
    await runner.setup()
    try:
        await web.TCPSite(runner, config.gateway.host, config.gateway.port).start()
        for address in runner.addresses:
            logger.info("event=listening host=%s port=%s", address[0], address[1])
        await _stop_signal()
        await _drain(app, float(config.timeouts.drain))
    finally:
        await runner.cleanup()


async def _stop_signal() -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
    # A second signal ends the process the default way.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)


async def _drain(app: web.Application, timeout_s: float) -> None:
    """Refuse new requests and let running ones finish."""
    admission = app[GATEWAY].admission
    admission.draining = True
    logger.info("event=draining inflight=%d timeout_s=%.0f", admission.inflight, timeout_s)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await admission.wait_idle()
    logger.info("event=drained inflight=%d", admission.inflight)


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop
