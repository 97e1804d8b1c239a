"""Which worker caches how much of a prompt: told by KV events, ahead of them by short-lived predictions."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from policies.types import Ints
from prfaas.protocol.messages import KVEvent, KVSnapshot, KVStored
from router.core.block_kernels import any_common, common_prefix
from router.core.block_table import BlockTable, Hashes, as_hashes


@dataclass(slots=True, eq=False)
class Prediction:
    """A prompt that a worker is held to have cached between two times."""

    slot: int
    hashes: Hashes
    from_s: float
    until_s: float
    first: int
    """Hash of its first block."""
    last: int
    over: bool = False
    """Confirmed, taken back or past its time."""


@dataclass(slots=True)
class _Worker:
    predictions: list[Prediction] = field(default_factory=list)
    generation: str | None = None
    sequence: int = 0
    needs_resync: bool = False


class PrefixIndex:
    """Blocks by worker slot. Removing what is unknown and storing what is known change nothing."""

    def __init__(self) -> None:
        self._table = BlockTable()
        self._workers: dict[int, _Worker] = {}
        self._coming: list[tuple[float, int, Prediction]] = []
        """A heap by `from_s`, then by age: predictions that no match has met in their time yet."""
        self._predicted = 0
        self._predictions: dict[int, list[Prediction]] = {}
        """Those whose time has come, by first block."""
        self.gaps_total = 0
        self.snapshots_total = 0

    def add_worker(self, slot: int) -> None:
        self._workers[slot] = _Worker()
        self._table.add_worker(slot)

    def remove_worker(self, slot: int) -> None:
        """Forget all of a worker's blocks and predictions."""
        self._clear(slot)
        del self._workers[slot]

    def apply(self, slot: int, event: KVEvent) -> None:
        """Apply a snapshot or a delta.

        A snapshot replaces everything. A delta that repeats is ignored; one that skips a sequence
        number, or is the first of its generation without a snapshot, is applied and flags the worker for
        a resync; a new generation clears the worker first.
        """
        worker, hashes = self._workers[slot], as_hashes(event.block_hashes)
        if type(event) is KVSnapshot:
            self.snapshots_total += 1
            self._clear(slot)
            self._store(slot, worker, hashes)
            worker.needs_resync = False
        else:
            if event.generation != worker.generation:
                self._clear(slot)
                self._flag_gap(worker)
            elif event.sequence <= worker.sequence:
                return
            elif event.sequence != worker.sequence + 1:
                self._flag_gap(worker)
            if type(event) is KVStored:
                self._store(slot, worker, hashes)
            else:
                self._remove(slot, worker, hashes)
        worker.generation, worker.sequence = event.generation, event.sequence

    def needs_resync(self, slot: int) -> bool:
        """Whether this worker's deltas had a gap, so that its blocks are to be read anew."""
        return self._workers[slot].needs_resync

    def predict(self, slot: int, hashes: Sequence[int] | Hashes, from_s: float, until_s: float) -> Prediction:
        """Count `hashes` (at least one) as cached on the worker between two times, unless KV events
        confirm them or take them back before."""
        chain = as_hashes(hashes)
        prediction = Prediction(slot, chain, from_s, until_s, chain.item(0), chain.item(-1))
        self._predicted += 1
        heapq.heappush(self._coming, (from_s, self._predicted, prediction))
        self._workers[slot].predictions.append(prediction)
        return prediction

    def withdraw(self, prediction: Prediction) -> None:
        """The placement behind it has failed. One that is over already is ignored."""
        if prediction.over:
            return
        prediction.over = True
        self._workers[prediction.slot].predictions.remove(prediction)
        same_start = self._predictions.get(prediction.first, [])
        if prediction in same_start:
            same_start.remove(prediction)
            if not same_start:
                del self._predictions[prediction.first]

    def sweep(self, now_s: float) -> None:
        """Drop predictions that are over."""
        for worker in self._workers.values():
            if worker.predictions:
                for prediction in [p for p in worker.predictions if p.until_s <= now_s]:
                    self.withdraw(prediction)
        self._meet(now_s)

    def match(self, hashes: Sequence[int] | Hashes, slots: int, now_s: float) -> Ints:
        """Blocks of the longest contiguous cached prefix, by worker slot; shape [slots]."""
        chain = as_hashes(hashes)
        matched = self._table.match(chain, slots)
        if self._coming and self._coming[0][0] <= now_s:
            self._meet(now_s)
        length = len(chain)
        if length and self._predictions:
            for prediction in self._predictions.get(chain.item(0), ()):
                if prediction.from_s <= now_s < prediction.until_s:
                    # Most share no more than what is cached anyhow, and the next block tells.
                    hashes, known = prediction.hashes, matched.item(prediction.slot)
                    if known < length and known < len(hashes) and chain.item(known) == hashes.item(known):
                        matched[prediction.slot] = common_prefix(chain, hashes)
        return matched

    def blocks(self, slot: int) -> int:
        """Blocks that KV events say are cached on this worker."""
        return self._table.blocks(slot)

    def __len__(self) -> int:
        """Distinct blocks cached anywhere."""
        return len(self._table)

    def _meet(self, now_s: float) -> None:
        """Let predictions count whose time has come."""
        while self._coming and self._coming[0][0] <= now_s:
            prediction = heapq.heappop(self._coming)[2]
            if not prediction.over:
                self._predictions.setdefault(prediction.first, []).append(prediction)

    def _flag_gap(self, worker: _Worker) -> None:
        worker.needs_resync = True
        self.gaps_total += 1

    def _store(self, slot: int, worker: _Worker, hashes: Hashes) -> None:
        self._table.store(slot, hashes)
        if worker.predictions:
            stored = set(hashes.tolist())
            for prediction in [p for p in worker.predictions if p.last in stored]:
                self.withdraw(prediction)

    def _remove(self, slot: int, worker: _Worker, hashes: Hashes) -> None:
        self._table.remove(slot, hashes)
        if worker.predictions:
            for prediction in [p for p in worker.predictions if any_common(hashes, p.hashes)]:
                self.withdraw(prediction)

    def _clear(self, slot: int) -> None:
        self._table.clear(slot)
        for prediction in list(self._workers[slot].predictions):
            self.withdraw(prediction)
