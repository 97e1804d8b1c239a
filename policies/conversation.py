"""Schedule conversations, not turns."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from policies.base import BasePolicy, gather
from policies.pairing import Grouping, Where, decode_occupancy, site_then_decode
from policies.types import Candidates, FleetView, RequestView


class Conversation(BasePolicy):
    """First turn: prefill where least is queued, decode where most KV is free; later turns stay there.

    ConServe (arXiv 2606.01839): KV is transferred once, then the conversation is pinned to its decode
    worker, which prefills each further turn itself after the prefix that it holds. Placement needs only
    the first turn's length and the workers' KV occupancy, both observed, nothing predicted.

    A conversation is a request's session; requests without one are first turns. A pin is given up when its
    worker cannot take the turn (gone, or its queue full), which is then placed like a first one.

    Args:
        max_sessions: pins kept; the longest unused is forgotten first.
        where: sites considered for first turns (`policies.pairing.Where`).

    Raises:
        ValueError: `max_sessions` is not positive, or `where` is another word.
    """

    def __init__(self, max_sessions: int = 100_000, where: str = "prefill") -> None:
        if max_sessions < 1:
            raise ValueError(f"max_sessions must be 1 or more, is {max_sessions}")
        self._max_sessions = max_sessions
        self._where = Where(where)
        self._local = Grouping()
        self._pinned: OrderedDict[str, str] = OrderedDict()
        """Decode worker by session, longest unused first."""

    def choose(
        self, request: RequestView, candidates: Candidates, view: FleetView, rng: np.random.Generator
    ) -> int:
        row = self._next_turn(request, candidates)
        if row is None:
            row = self._first_turn(candidates, view, rng)
        self._pin(request.session, candidates.decode[row])
        return row

    def _next_turn(self, request: RequestView, candidates: Candidates) -> int | None:
        """The pinned worker by itself, where there is one that can take it."""
        decode = self._pinned.get(request.session)
        if decode is None:
            return None
        local = self._local.of(candidates).local.tolist()
        return next((row for row in local if candidates.decode[row] == decode), None)

    def _first_turn(self, candidates: Candidates, view: FleetView, rng: np.random.Generator) -> int:
        rows = self._where.rows(candidates)
        queued = gather(view.queued_tokens, candidates.site) + candidates.uncached_tokens
        return site_then_decode(queued, decode_occupancy(candidates, view), candidates, view, rng, rows)

    def _pin(self, session: str, decode: str) -> None:
        if not session:
            return
        self._pinned[session] = decode
        self._pinned.move_to_end(session)
        if len(self._pinned) > self._max_sessions:
            self._pinned.popitem(last=False)
