"""The choices of one request, run side by side, as one stream of updates."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType

from prfaas.protocol.messages import Finished, Tokens
from prfaas.protocol.openai_errors import ApiError
from router.answer import Choice, Update
from router.dispatch import Dispatcher, Job
from router.trace import Trace

logger = logging.getLogger(__name__)


class Run:
    """One choice to generate: what to do, what has become of it, and its record."""

    def __init__(self, job: Job, choice: Choice, trace: Trace) -> None:
        self.job = job
        self.choice = choice
        self.trace = trace


class Fanout:
    """Runs `runs`; use as a context manager, and iterate once.

    The first choice of each prompt is placed first; when its first token arrives the prompt is in a
    cache, and the others are placed with that knowledge. Leaving the block cancels what still runs.
    """

    def __init__(self, dispatcher: Dispatcher, runs: Sequence[Run]) -> None:
        self._dispatcher = dispatcher
        self._runs = runs
        self._updates: asyncio.Queue[tuple[Run, Update | ApiError]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Fanout:
        leaders: dict[int, asyncio.Event] = {}
        for run in self._runs:
            leader = leaders.get(run.choice.prompt)
            if leader is None:
                leaders[run.choice.prompt] = started = asyncio.Event()
                self._tasks.append(asyncio.create_task(self._run(run, None, started)))
            else:
                self._tasks.append(asyncio.create_task(self._run(run, leader, None)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def updates(self) -> AsyncGenerator[tuple[Run, Update], None]:
        """Updates as they come, already applied to their choice; ends with the last choice.

        Raises:
            ApiError: a choice failed for good.
        """
        unfinished = len(self._runs)
        while unfinished:
            run, update = await self._updates.get()
            if isinstance(update, ApiError):
                raise update
            run.choice.apply(update)
            yield run, update
            unfinished -= isinstance(update, Finished)

    async def _run(self, run: Run, leader: asyncio.Event | None, started: asyncio.Event | None) -> None:
        if leader is not None:
            await leader.wait()

        def emit(update: Update) -> None:
            if started is not None and isinstance(update, Tokens | Finished):
                started.set()
            self._updates.put_nowait((run, update))

        try:
            await self._dispatcher.run(run.job, run.trace, emit)
        except ApiError as error:
            self._updates.put_nowait((run, error))
        except Exception:
            logger.exception("event=dispatch_defect request=%s", run.job.request_id)
            defect = ApiError(500, "internal error; the gateway's log has the details", code="internal")
            self._updates.put_nowait((run, defect))
