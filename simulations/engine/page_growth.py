"""When the running sequences of a decode worker need their next pages."""

from __future__ import annotations

from heapq import heappop, heappush, nsmallest
from typing import TYPE_CHECKING

from simulations.engine.page_cache import PageCache
from simulations.engine.request import DECODING, Request

if TYPE_CHECKING:
    from simulations.engine.decode_worker import DecodeWorker

NEVER = 1 << 40


class PageGrowth:
    """A sequence grows by a page whenever its answer has filled the former one. Steps count from the begin of
    the worker's incarnation. Nothing is taken out of the heap when a sequence ends or is preempted: entries
    are looked at again when their step has come.
    """

    __slots__ = ("_cache", "_heap", "_page", "_worker")

    def __init__(self, worker: DecodeWorker, cache: PageCache, page_size: int) -> None:
        self._worker = worker
        self._cache = cache
        self._page = page_size
        self._heap: list[tuple[int, int, Request]] = []
        """(step, order, sequence)."""

    @property
    def next_step(self) -> int:
        """The first step for which a sequence may need a page more; `NEVER` where none will."""
        return self._heap[0][0] if self._heap else NEVER

    def expect(self, request: Request) -> None:
        """The sequence has just got pages: note when they will be full, if that is before its end."""
        step = self._step(request)
        if step <= request.finish_step:
            heappush(self._heap, (step, request.order, request))

    def pop(self, until_step: int) -> Request | None:
        """The next sequence that needs a page for a step up to `until_step`."""
        heap = self._heap
        while heap and heap[0][0] <= until_step:
            step, _, request = heappop(heap)
            if request.state == DECODING and request.decode is self._worker and self._step(request) == step:
                return request
        return None

    def take(self, until_step: int) -> bool:
        """Grow all whose pages are full before `until_step`, for which there are pages; whether any was."""
        grown = False
        while (request := self.pop(until_step)) is not None:
            assert request.held is not None
            grew = self._cache.grow(request.held, request.held.pages + 1)
            assert grew, f"{self._worker.name} planned steps without pages for them"
            self.expect(request)
            grown = True
        return grown

    def steps_covered(self, done: int) -> int:
        """Steps after the first `done` ones for which there are pages, whoever needs one; huge where the pool
        is far from empty."""
        heap, available = self._heap, self._cache.available
        if not heap:
            return NEVER
        if len(heap) <= available:
            # Within a page's worth of steps everyone grows once.
            return available // len(heap) * self._page
        first_lacking = nsmallest(available + 1, heap)[-1][0]
        return min(first_lacking - 1 - done, self._page)

    def _step(self, request: Request) -> int:
        """The step for which the sequence needs one page more than it holds."""
        assert request.held is not None
        return request.held.pages * self._page - request.context + 1
