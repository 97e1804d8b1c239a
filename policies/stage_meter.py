"""What the stages of a PrfaaS deployment can do, measured from the live view: workers, links, decode rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

from policies.congestion import Pressure
from policies.threshold_solver import Capacity
from policies.types import FleetView

MEMORY_S = 60.0
"""Time constant of rates."""
FEWEST_ANSWERS = 10


@dataclass(frozen=True, slots=True)
class Stages:
    """Ready workers by stage, and what they can do."""

    prefills: tuple[str, ...]
    """Prefill workers of PD clusters: clusters that have decode workers."""
    decodes: tuple[str, ...]
    remotes: tuple[str, ...]
    """Prefill workers of the other clusters."""
    links: tuple[str, ...]
    """Directions from those clusters to PD clusters."""
    capacity: Capacity

    @property
    def home_sites(self) -> int:
        """Workers that prefill at home: the decode workers where there are no others."""
        return len(self.prefills) or len(self.decodes)

    def pressure(self, view: FleetView, prefill_s: float) -> Pressure:
        """How long work waits, in units of `prefill_s`."""
        utilisation = [view.link_utilisation[link] for link in self.links]
        return Pressure(
            away_queue=_mean_queue_s(self.remotes, view) / prefill_s,
            home_queue=_mean_queue_s(self.prefills or self.decodes, view) / prefill_s,
            link_utilisation=sum(utilisation) / len(utilisation) if utilisation else 0.0,
        )


class StageMeter:
    """Counts arrivals, answers and generated tokens, with fading memory.

    Tokens generated over answers finished is an answer's length (Little's law): policies are told no
    lengths of answers.

    Args:
        tpot_s: longest decode step that counts as service.
    """

    def __init__(self, tpot_s: float = math.inf) -> None:
        self._tpot_s = tpot_s
        self._arrived = self._finished = self._tokens = self._seconds = 0.0
        self._observed_s = 0.0

    def arrived(self) -> None:
        self._arrived += 1

    def finished(self) -> None:
        self._finished += 1

    def tick(self, view: FleetView, elapsed_s: float) -> None:
        """`elapsed_s` more have passed, with the batches that run now."""
        generated = sum(
            view.running[worker] / _step_s(view, worker, view.running[worker]) for worker in _decodes(view)
        )
        self._observed_s += elapsed_s
        fade = math.exp(-elapsed_s / MEMORY_S)
        self._tokens = (self._tokens + generated * elapsed_s) * fade
        self._seconds = (self._seconds + elapsed_s) * fade
        self._arrived *= fade
        self._finished *= fade

    @property
    def settled(self) -> bool:
        """Whether enough has been seen for answers' lengths to be believed: while the first ones are being
        generated, none has finished, and decode looks idle or endless."""
        return self._observed_s >= 2 * MEMORY_S and self._finished >= FEWEST_ANSWERS

    @property
    def arrival_rate(self) -> float:
        """Requests per second."""
        return self._arrived / self._seconds if self._seconds else 0.0

    @property
    def answer_tokens(self) -> float:
        """Of a mean answer; 0 while none has finished."""
        return self._tokens / self._finished if self._finished > 0 else 0.0

    def answer_s(self, view: FleetView) -> float:
        """How long a mean answer takes with the batches that run now."""
        steps = [_step_s(view, worker, max(1, view.running[worker])) for worker in _decodes(view)]
        return self.answer_tokens * max(steps, default=0.0)

    def stages(self, view: FleetView) -> Stages:
        """The fleet as it is now."""
        homes = {view.cluster[worker] for worker in view.workers if view.role[worker] == "decode"}
        ready = [worker for worker in view.workers if view.ready[worker]]
        decodes = _decodes(view)
        prefills = tuple(w for w in ready if view.role[w] == "prefill" and view.cluster[w] in homes)
        remotes = tuple(w for w in ready if view.role[w] == "prefill" and view.cluster[w] not in homes)
        sources = sorted({view.cluster[worker] for worker in remotes})
        pairs = [f"{source}->{home}" for source in sources for home in sorted(homes)]
        links = tuple(link for link in pairs if link in view.link_bytes_per_s)
        rates = [self._decode_rate(view, worker) for worker in decodes]
        capacity = Capacity(
            away_workers=len(remotes),
            link_bytes_per_s=sum(view.link_bytes_per_s[link] for link in links),
            decode_rate=sum(rates) / len(rates) if rates else 0.0,
        )
        return Stages(prefills, decodes, remotes, links, capacity)

    def _decode_rate(self, view: FleetView, worker: str) -> float:
        """Answers per second of the fullest batch that the worker's slots, pages and step time allow."""
        if self.answer_tokens <= 0:
            return math.inf
        batch = view.max_running[worker]
        running = view.running[worker]
        if running:
            context = view.running_context_tokens[worker] / running
            pool = view.total_pages[worker] * view.page_tokens[worker]
            batch = max(1, min(batch, int(pool / max(context, 1.0))))
        while batch > 1 and _step_s(view, worker, batch) > self._tpot_s:
            batch = max(1, batch * 3 // 4)
        return batch / (_step_s(view, worker, batch) * self.answer_tokens)


def _decodes(view: FleetView) -> tuple[str, ...]:
    return tuple(w for w in view.workers if view.ready[w] and view.role[w] == "decode")


def _step_s(view: FleetView, worker: str, batch: int) -> float:
    """A decode step of `batch` sequences as long as those that run now; never 0."""
    running = view.running[worker]
    context = batch * view.running_context_tokens[worker] / running if running else 0.0
    step_s = (
        view.decode_base_s[worker]
        + batch * view.decode_sequence_s[worker]
        + context * view.decode_context_s[worker]
    )
    return max(step_s, 1e-6)


def _mean_queue_s(workers: tuple[str, ...], view: FleetView) -> float:
    """Mean seconds until each is through with its prefills."""
    if not workers:
        return 0.0
    return sum(max(0.0, view.prefill_ends_s[worker] - view.now_s) for worker in workers) / len(workers)
