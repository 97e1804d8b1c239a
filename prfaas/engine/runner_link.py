"""The control process's end of one runner process: start it, run steps, notice its death, end it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from pathlib import Path

import msgspec

from prfaas.engine.framing import FrameReader, FrameWriter
from prfaas.engine.runner_process import RunnerConfig
from prfaas.engine.step import RunnerError, RunnerMessage, RunnerReady, StepPlan, StepResult
from prfaas.errors import EngineFailure
from prfaas.kv.layout import KVLayout

logger = logging.getLogger(__name__)

_LAST_WORDS_BYTES = 2000
_EXIT_GRACE_S = 2.0
"""How long a runner may take to leave by itself once its socket is closed."""


class RunnerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to run and where its words go."""

    model_path: Path
    layout: KVLayout
    device: str
    dtype: str
    threads: int
    cpus: list[int]
    cpu_share: float
    pool_fd: int
    counter_fd: int
    log_path: Path
    """stdout and stderr of the runner are appended here."""


class RunnerLink(asyncio.Protocol):
    """One runner process. Messages go one at a time: a plan, then its answer."""

    def __init__(self) -> None:
        self._writer = FrameWriter()
        self._reader = FrameReader()
        self._decoder = msgspec.msgpack.Decoder(RunnerMessage)
        self._answer: asyncio.Future[RunnerMessage] | None = None
        self._transport: asyncio.Transport | None = None
        self._log_path = Path(os.devnull)
        self._log_start = 0
        self.process: asyncio.subprocess.Process | None = None
        self.lost = asyncio.Event()
        """Set when the runner has closed its end: it is dead or dying."""

    @classmethod
    async def start(cls, spec: RunnerSpec, deadline_s: float) -> RunnerLink:
        """Start a runner and wait until its model is loaded.

        Raises:
            EngineFailure: it died or was not ready within `deadline_s`; the message has its last words.
        """
        link = cls()
        try:
            await link._spawn(spec)
            ready = await link._wait(link._expect(), deadline_s, "loading the model")
            if not isinstance(ready, RunnerReady):
                raise EngineFailure(f"runner's first message was {ready!r}")
        except BaseException:
            await link.close(kill=True)
            raise
        return link

    async def execute(self, plan: StepPlan, deadline_s: float) -> StepResult | RunnerError:
        """Run one step.

        Raises:
            EngineFailure: the runner died, or has not answered after `deadline_s`.
        """
        if self._transport is None or self.lost.is_set():
            raise EngineFailure(f"runner is gone{self.last_words()}")
        answer = self._expect()
        self._transport.write(self._writer.frame(plan))
        result = await self._wait(answer, deadline_s, f"running step {plan.step}")
        if isinstance(result, RunnerReady):
            raise EngineFailure("runner said `ready` in answer to a step")
        return result

    async def close(self, *, kill: bool = False) -> None:
        """End the runner and wait until it is gone: nothing writes the pool afterwards.

        Args:
            kill: do not let it finish its step first.
        """
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        process = self.process
        if process is None:
            return
        if not kill:
            try:
                await asyncio.wait_for(process.wait(), _EXIT_GRACE_S)
            except TimeoutError:
                logger.warning("event=runner_killed pid=%d reason=did_not_leave", process.pid)
        if process.returncode is None:
            process.kill()
        await process.wait()

    # ------------------------------------------------------------ asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._reader.feed(data):
                message = self._decoder.decode(payload)
                if self._answer is None or self._answer.done():
                    raise ValueError(f"unexpected message {message!r}")
                self._answer.set_result(message)
        except (ValueError, msgspec.MsgspecError) as error:
            self._fail(f"runner answered nonsense: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("runner closed its connection")

    # ------------------------------------------------------------ inside

    async def _spawn(self, spec: RunnerSpec) -> None:
        ours, theirs = socket.socketpair()
        try:
            await self._start_process(spec, theirs.fileno())
            loop = asyncio.get_running_loop()
            self._transport, _ = await loop.create_unix_connection(lambda: self, sock=ours)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    async def _start_process(self, spec: RunnerSpec, socket_fd: int) -> None:
        config = RunnerConfig(
            parent_pid=os.getpid(),
            socket_fd=socket_fd,
            pool_fd=spec.pool_fd,
            counter_fd=spec.counter_fd,
            model_path=str(spec.model_path),
            layout=spec.layout,
            device=spec.device,
            dtype=spec.dtype,
            threads=spec.threads,
            cpus=spec.cpus,
            cpu_share=spec.cpu_share,
        )
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        log_fd = os.open(spec.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._log_path, self._log_start = spec.log_path, os.fstat(log_fd).st_size
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "prfaas.engine.runner_process"),
                msgspec.json.encode(config).decode(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                pass_fds=(socket_fd, spec.pool_fd, spec.counter_fd),
                env={**os.environ, "OMP_NUM_THREADS": str(spec.threads)},
            )
        finally:
            os.close(log_fd)

    def _expect(self) -> asyncio.Future[RunnerMessage]:
        self._answer = asyncio.get_running_loop().create_future()
        if self.lost.is_set():
            self._fail("runner is gone")
        return self._answer

    async def _wait(
        self, answer: asyncio.Future[RunnerMessage], deadline_s: float, what: str
    ) -> RunnerMessage:
        # One timer, not wait_for: this runs once per decode step.
        timer = asyncio.get_running_loop().call_later(
            deadline_s, self._fail, f"runner silent for {deadline_s} s while {what}"
        )
        try:
            return await answer
        finally:
            timer.cancel()

    def _fail(self, message: str) -> None:
        self.lost.set()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(EngineFailure(message + self.last_words()))

    def last_words(self) -> str:
        """The end of what this runner has logged, for error messages."""
        try:
            with open(self._log_path, "rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - _LAST_WORDS_BYTES))
                text = log.read().decode(errors="replace").strip()
        except OSError:
            return ""
        return f"; its last words:\n{text}" if text else ""
