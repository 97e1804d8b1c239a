"""Which worker caches which block: fed by KV events, ahead of them by short-lived predictions.

An inverted index from block hash to a bit mask of worker slots, so one walk along a prompt's chained
hashes finds the longest contiguous prefix on every worker at once. Chained hashes also make predictions
cheap: two prompts that agree on block i agree on all before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from policies.types import Ints
from prfaas.protocol.messages import KVEvent, KVSnapshot, KVStored


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """A prompt that a worker is held to have cached between two times."""

    slot: int
    hashes: Sequence[int]
    from_s: float
    until_s: float


@dataclass(slots=True)
class _Worker:
    blocks: set[int] = field(default_factory=set)
    predictions: list[Prediction] = field(default_factory=list)
    generation: str | None = None
    sequence: int = 0
    needs_resync: bool = False


class PrefixIndex:
    """Blocks by worker slot. Removing what is unknown and storing what is known change nothing."""

    def __init__(self) -> None:
        self._owners: dict[int, int] = {}
        self._workers: dict[int, _Worker] = {}
        self._predictions: dict[int, list[Prediction]] = {}
        """By first block."""
        self.gaps_total = 0
        self.snapshots_total = 0

    def add_worker(self, slot: int) -> None:
        self._workers[slot] = _Worker()

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
        worker = self._workers[slot]
        if isinstance(event, KVSnapshot):
            self.snapshots_total += 1
            self._clear(slot)
            self._store(slot, event.block_hashes)
            worker.needs_resync = False
        else:
            if event.generation != worker.generation:
                self._clear(slot)
                self._flag_gap(worker)
            elif event.sequence <= worker.sequence:
                return
            elif event.sequence != worker.sequence + 1:
                self._flag_gap(worker)
            change = self._store if isinstance(event, KVStored) else self._remove
            change(slot, event.block_hashes)
        worker.generation, worker.sequence = event.generation, event.sequence

    def needs_resync(self, slot: int) -> bool:
        """Whether this worker's deltas had a gap, so that its blocks are to be read anew."""
        return self._workers[slot].needs_resync

    def predict(self, slot: int, hashes: Sequence[int], from_s: float, until_s: float) -> Prediction:
        """Count `hashes` (at least one) as cached on the worker between two times, unless KV events
        confirm them or take them back before."""
        prediction = Prediction(slot, hashes, from_s, until_s)
        self._predictions.setdefault(hashes[0], []).append(prediction)
        self._workers[slot].predictions.append(prediction)
        return prediction

    def withdraw(self, prediction: Prediction) -> None:
        """The placement behind it has failed. One that is over already is ignored."""
        worker = self._workers.get(prediction.slot)
        if worker is not None and prediction in worker.predictions:
            worker.predictions.remove(prediction)
            same_start = self._predictions[prediction.hashes[0]]
            same_start.remove(prediction)
            if not same_start:
                del self._predictions[prediction.hashes[0]]

    def sweep(self, now_s: float) -> None:
        """Drop predictions that are over."""
        for worker in self._workers.values():
            for prediction in [p for p in worker.predictions if p.until_s <= now_s]:
                self.withdraw(prediction)

    def match(self, hashes: Sequence[int], slots: int, now_s: float) -> Ints:
        """Blocks of the longest contiguous cached prefix, by worker slot; shape [slots]."""
        matched = [0] * slots
        if hashes:
            self._match_events(hashes, matched)
            self._match_predictions(hashes, matched, now_s)
        return np.array(matched, dtype=np.int64)

    def blocks(self, slot: int) -> int:
        """Blocks that KV events say are cached on this worker."""
        return len(self._workers[slot].blocks)

    def __len__(self) -> int:
        """Distinct blocks cached anywhere."""
        return len(self._owners)

    def _match_predictions(self, hashes: Sequence[int], matched: list[int], now_s: float) -> None:
        depths: dict[int, int] = {}
        for prediction in self._predictions.get(hashes[0], ()):
            if prediction.from_s <= now_s < prediction.until_s:
                last = prediction.hashes[-1]
                if last not in depths:
                    depths[last] = _common_prefix(hashes, prediction.hashes)
                matched[prediction.slot] = max(matched[prediction.slot], depths[last])

    def _match_events(self, hashes: Sequence[int], matched: list[int]) -> None:
        owners = self._owners
        alive = (1 << len(matched)) - 1
        for depth, block in enumerate(hashes):
            still = alive & owners.get(block, 0)
            if still != alive:
                _record(matched, alive & ~still, depth)
                alive = still
                if not alive:
                    return
        _record(matched, alive, len(hashes))

    def _flag_gap(self, worker: _Worker) -> None:
        worker.needs_resync = True
        self.gaps_total += 1

    def _store(self, slot: int, hashes: Iterable[int]) -> None:
        worker, stored, bit = self._workers[slot], set(hashes), 1 << slot
        worker.blocks |= stored
        for block in stored:
            self._owners[block] = self._owners.get(block, 0) | bit
        for prediction in [p for p in worker.predictions if p.hashes[-1] in stored]:
            self.withdraw(prediction)

    def _remove(self, slot: int, hashes: Iterable[int]) -> None:
        worker, removed, bit = self._workers[slot], set(hashes), 1 << slot
        for block in removed & worker.blocks:
            left = self._owners[block] & ~bit
            if left:
                self._owners[block] = left
            else:
                del self._owners[block]
        worker.blocks -= removed
        for prediction in [p for p in worker.predictions if not removed.isdisjoint(p.hashes)]:
            self.withdraw(prediction)

    def _clear(self, slot: int) -> None:
        worker = self._workers[slot]
        self._remove(slot, list(worker.blocks))
        for prediction in list(worker.predictions):
            self.withdraw(prediction)


def _record(matched: list[int], slots: int, depth: int) -> None:
    while slots and depth:
        lowest = slots & -slots
        matched[lowest.bit_length() - 1] = depth
        slots ^= lowest


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix of two hash chains that agree on their first block."""
    low, high = 1, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
