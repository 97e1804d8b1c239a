"""The native engine: batch scheduler here, torch in a runner process, KV in memory that both share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from prfaas.engine.calibration import measure_profile
from prfaas.engine.interface import (
    ChunkPlan,
    Engine,
    EngineLoad,
    SequenceEvent,
    SequenceRequest,
    StepProfile,
)
from prfaas.engine.model_config import LlamaConfig
from prfaas.engine.runner_link import RunnerLink, RunnerSpec
from prfaas.engine.scheduler import BatchScheduler
from prfaas.engine.step import RunnerError, StepPlan, StepResult
from prfaas.errors import EngineFailure
from prfaas.kv.layout import KVLayout
from prfaas.kv.pool import PagePool
from prfaas.kv.shared_buffer import SharedBuffer, SharedLayerCounter

logger = logging.getLogger(__name__)

CALIBRATION_BUDGET_S = 7.0


def _ignore_chunk(_: ChunkPlan) -> None:
    pass


def _ignore_failure(_: EngineFailure) -> None:
    pass


class Runner(Protocol):
    """Runs one step after the other; `RunnerLink` is one in a process of its own."""

    lost: asyncio.Event
    """Set when the runner is gone."""

    async def execute(self, plan: StepPlan, deadline_s: float) -> StepResult | RunnerError:
        """Run one step.

        Raises:
            EngineFailure: the runner is gone, or has not answered after `deadline_s`.
        """
        ...

    async def close(self, *, kill: bool = False) -> None:
        """End it; nothing writes the pool afterwards."""
        ...

    def last_words(self) -> str:
        """What it said at its end, for error messages."""
        ...


class NativeEngine(Engine):
    """One runner process driven from the event loop that calls `start`.

    The shared memory exists from construction on, so that NIXL can register it before `start`. An engine
    whose runner has died or fallen silent has failed for good: its sequences and later ones end with
    `error`; the host makes a new engine.

    Args:
        model_path: HF folder.
        layout: the KV pool's shape; `dtype` must be its dtype.
        device, dtype, threads, cpus, cpu_share: see `WorkerConfig`.
        chunk_tokens: most prefill tokens in one step.
        max_running: most sequences decoded together.
        log_path: file to which the runner's output is appended.
        start_deadline_s: the runner must have loaded the model within this time.
        step_deadline_s: a runner that takes longer for one step counts as dead and is killed.

    Attributes:
        buffer: the KV pool's memory.
        on_failure: called once when the engine fails.
        failure: why it failed, or None.

    Raises:
        ConfigError: the model folder cannot be used.
    """

    def __init__(
        self,
        model_path: Path,
        layout: KVLayout,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        threads: int = 1,
        cpus: Sequence[int] = (),
        cpu_share: float = 1.0,
        chunk_tokens: int = 256,
        max_running: int = 16,
        log_path: Path,
        start_deadline_s: float = 120.0,
        step_deadline_s: float = 60.0,
    ) -> None:
        model = LlamaConfig.load(model_path)
        self.layout = layout
        self.context_length = model.context_length
        self._wake = asyncio.Event()
        self.pool = PagePool(layout.num_pages, layout.page_size)
        self.pool.on_available.append(self._wake.set)
        self.buffer = SharedBuffer(layout.pool_bytes, "prfaas-kv")
        self.layer_counter: SharedLayerCounter = SharedLayerCounter()
        self.on_chunk = _ignore_chunk
        self.on_failure: Callable[[EngineFailure], None] = _ignore_failure
        self.failure: EngineFailure | None = None
        self._chunk_tokens = chunk_tokens
        self._max_running = max_running
        self._start_deadline_s = start_deadline_s
        self._step_deadline_s = step_deadline_s
        self._spec = RunnerSpec(
            model_path=model_path,
            layout=layout,
            device=device,
            dtype=dtype,
            threads=threads,
            cpus=list(cpus),
            cpu_share=cpu_share,
            pool_fd=self.buffer.fd,
            counter_fd=self.layer_counter.fd,
            log_path=log_path,
        )
        self._scheduler = BatchScheduler(
            self.pool,
            chunk_tokens=chunk_tokens,
            max_running=max_running,
            context_length=model.context_length,
            eos_token_ids=frozenset(model.eos_token_ids),
        )
        self._listeners: dict[str, Callable[[SequenceEvent], None]] = {}
        self._link: Runner | None = None
        self._runner_free = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._busy_s = 0.0
        self._stopped = False

    # ------------------------------------------------------------ Engine

    async def start(self) -> None:
        self._link = await self._start_runner()
        self._tasks |= {
            asyncio.create_task(self._run(), name="engine-steps"),
            asyncio.create_task(self._watch(self._link), name="engine-watch"),
        }

    async def stop(self) -> None:
        self._stopped = True
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._link is not None:
            await self._link.close()
        self._scheduler.end_all("cancelled")
        self._deliver()
        self.buffer.close()
        self.layer_counter.close()

    def submit(self, request: SequenceRequest, on_event: Callable[[SequenceEvent], None]) -> None:
        """Queue a sequence. FIFO within prefill; decodes join the running batch as slots free up.

        Raises:
            ValueError: the request contradicts itself; its pages are still the caller's.
            EngineFailure: the engine was stopped; its pages are still the caller's.
        """
        if self._stopped:
            raise EngineFailure("engine is stopped and takes no sequences")
        self._scheduler.submit(request)
        self._listeners[request.sequence_id] = on_event
        if self.failure is not None:
            self._scheduler.cancel(request.sequence_id, f"engine has failed: {self.failure}")
            asyncio.get_running_loop().call_soon(self._deliver)
        self._wake.set()

    def cancel(self, sequence_id: str) -> None:
        self._scheduler.cancel(sequence_id)
        self._wake.set()

    def load(self) -> EngineLoad:
        return msgspec.structs.replace(self._scheduler.load(), busy_s_total=self._busy_s)

    async def calibrate(self, contexts: Sequence[int], batches: Sequence[int]) -> StepProfile:
        """Time prefill chunks and decode steps on scratch pages and fit a `StepProfile`.

        Sequences submitted meanwhile wait. Cancelling the caller does not stop the measurement.

        Raises:
            RuntimeError: sequences are running: their steps would be slow, and the figures wrong.
            EngineFailure: the runner died.
            OutOfPages: too few pages are free for scratch.
        """
        self._require_idle()
        task = asyncio.create_task(self._calibrate(contexts, batches), name="engine-calibrate")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _calibrate(self, contexts: Sequence[int], batches: Sequence[int]) -> StepProfile:
        async with self._runner_free:
            self._require_idle()
            try:
                return await measure_profile(
                    self._execute,
                    self.pool,
                    chunk_tokens=self._chunk_tokens,
                    context_length=self.context_length,
                    contexts=contexts,
                    batches=sorted({min(batch, self._max_running) for batch in batches}),
                    budget_s=CALIBRATION_BUDGET_S,
                )
            except EngineFailure as failure:
                await self._fail(failure)
                raise

    def _require_idle(self) -> None:
        if not self._scheduler.idle:
            raise RuntimeError("calibrate() needs an idle engine; wait until its sequences have ended")

    # ------------------------------------------------------------ the loop

    async def _start_runner(self) -> Runner:
        return await RunnerLink.start(self._spec, self._start_deadline_s)

    async def _run(self) -> None:
        """Step after step while there is work; asleep otherwise."""
        try:
            while True:
                await self._wake.wait()
                async with self._runner_free:
                    while await self._step():
                        pass
        except EngineFailure as failure:
            await self._fail(failure)
        except Exception as error:
            logger.exception("event=engine_loop_failed")
            await self._fail(EngineFailure(f"engine loop failed: {type(error).__name__}: {error}"))

    async def _step(self) -> bool:
        """Plan and run one step; False when there was nothing to run."""
        step = self._scheduler.plan(self.layer_counter.value())
        self._wake.clear()  # only now: planning itself may have moved pages
        self._deliver()
        if step is None:
            return False
        for chunk in step.chunks:
            self._announce(chunk)
        began_s = time.perf_counter()
        answer = await self._execute(step.plan)
        self._busy_s += time.perf_counter() - began_s
        if isinstance(answer, StepResult):
            self._scheduler.finish(answer)
        else:
            logger.error("event=step_failed step=%d error=%s", answer.step, answer.message)
            self._scheduler.fail_step(answer.message)
        self._deliver()
        return True

    async def _execute(self, plan: StepPlan) -> StepResult | RunnerError:
        if self._link is None:
            raise EngineFailure("engine has not been started")
        return await self._link.execute(plan, self._step_deadline_s)

    async def _watch(self, link: Runner) -> None:
        """A runner that dies between steps is noticed here."""
        await link.lost.wait()
        async with self._runner_free:  # a step in flight fails by itself, and with the better message
            if self.failure is None:
                await self._fail(EngineFailure(f"runner is gone{link.last_words()}"))

    async def _fail(self, failure: EngineFailure) -> None:
        """End every sequence, once the runner is surely dead and cannot write their pages any more."""
        if self.failure is not None:
            return
        self.failure = failure
        logger.error("event=engine_failed error=%s", failure)
        if self._link is not None:
            await self._link.close(kill=True)
        self._scheduler.end_all("error", str(failure))
        self._deliver()
        self.on_failure(failure)

    # ------------------------------------------------------------ callbacks of the host

    def _announce(self, chunk: ChunkPlan) -> None:
        try:
            self.on_chunk(chunk)
        except Exception as error:
            logger.exception("event=on_chunk_failed sequence=%s", chunk.sequence_id)
            self._scheduler.cancel(chunk.sequence_id, f"announcing a chunk failed: {error}")

    def _deliver(self) -> None:
        for event in self._scheduler.take_events():
            ended = event.finish_reason is not None
            listener = (self._listeners.pop if ended else self._listeners.__getitem__)(event.sequence_id)
            try:
                listener(event)
            except Exception:
                logger.exception("event=on_event_failed sequence=%s", event.sequence_id)
