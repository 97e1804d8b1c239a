"""Step times looked up in a cost table."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from prfaas.engine.interface import StepProfile
from simulations.fleet import HardwareSpec
from simulations.hardware.fit import fit_profile
from simulations.hardware.step_times import ANY_NUMBER, StepLine
from simulations.hardware.tables import CostTable


class TableStepTimes:
    """Bilinear between a table's knots: in new and prefix tokens, and in batch and context per sequence.

    Linear, not logarithmic: a decode step must be a line in context between knots (`decode_line`), and both
    kinds of step are sums of terms linear in their arguments, apart from the attention of a chunk to itself,
    which lines between powers of two overstate a little (at most ⅛ of that term). Below the first knot of new
    tokens a chunk costs what that knot costs; other ends go on as lines. Decode is made non-decreasing in
    context (estimates wobble by a few percent).
    """

    chunks_ahead = ANY_NUMBER

    def __init__(self, table: CostTable, spec: HardwareSpec) -> None:
        self.chunk_tokens = spec.chunk_tokens
        self.request_overhead_s = spec.request_overhead_s
        self._new = table.new_tokens.tolist()
        self._prefix = table.prefix_tokens.tolist()
        self._chunk_s: list[list[float]] = (
            table.prefill_s * spec.prefill_scale + spec.step_overhead_s
        ).tolist()
        self._batch = table.batch.tolist()
        self._context = table.context.tolist()
        steps = np.maximum.accumulate(table.decode_s, axis=1)
        self._decode_s = steps * spec.decode_scale + spec.step_overhead_s
        self._lines: dict[int, tuple[list[float], list[StepLine]]] = {}
        self._profile = self._fit(table, spec)

    def chunk_s(self, new_tokens: int, cached_tokens: int) -> float:
        new = max(float(new_tokens), self._new[0])
        row, along_new = _position(self._new, new)
        column, along_prefix = _position(self._prefix, float(cached_tokens))
        low, high = self._chunk_s[row], self._chunk_s[row + 1]
        at_low = low[column] + along_prefix * (low[column + 1] - low[column])
        at_high = high[column] + along_prefix * (high[column + 1] - high[column])
        return at_low + along_new * (at_high - at_low)

    def prefill_s(self, new_tokens: int, cached_tokens: int) -> float:
        total, done = 0.0, 0
        while done < new_tokens:
            chunk = min(self.chunk_tokens, new_tokens - done)
            total += self.chunk_s(chunk, cached_tokens + done)
            done += chunk
        return total

    def decode_line(self, batch: int, context_tokens: float) -> StepLine:
        found = self._lines.get(batch)
        if found is None:
            found = self._lines[batch] = self._lines_of(batch)
        ends, lines = found
        return lines[bisect_right(ends, context_tokens)]

    def shared_base_s(self) -> float:
        return min(self._chunk_s[0][0], self.decode_line(1, 0.0).base_s)

    def router_profile(self) -> StepProfile:
        return self._profile

    def _lines_of(self, batch: int) -> tuple[list[float], list[StepLine]]:
        """(ends of the inner segments, segments) over total context, for one batch size."""
        row, along = _position(self._batch, float(batch))
        seconds = self._decode_s[row] + along * (self._decode_s[row + 1] - self._decode_s[row])
        totals = [context * batch for context in self._context]
        lines = []
        for left in range(len(totals) - 1):
            slope = max((seconds[left + 1] - seconds[left]) / (totals[left + 1] - totals[left]), 0.0)
            base_s = float(seconds[left] - slope * totals[left])
            is_last = left == len(totals) - 2
            lines.append(StepLine(base_s, float(slope), float("inf") if is_last else totals[left + 1]))
        return totals[1:-1], lines

    @staticmethod
    def _fit(table: CostTable, spec: HardwareSpec) -> StepProfile:
        """The fit of the bare table, scaled as the table is: relative least squares commute with scaling."""
        bare, _ = fit_profile(table, spec.chunk_tokens, spec.kv_tokens)
        return StepProfile(
            chunk_tokens=spec.chunk_tokens,
            prefill_base_s=bare.prefill_base_s * spec.prefill_scale + spec.step_overhead_s,
            prefill_token_s=bare.prefill_token_s * spec.prefill_scale,
            prefill_context_s=bare.prefill_context_s * spec.prefill_scale,
            decode_base_s=bare.decode_base_s * spec.decode_scale + spec.step_overhead_s,
            decode_sequence_s=bare.decode_sequence_s * spec.decode_scale,
            decode_context_s=bare.decode_context_s * spec.decode_scale,
        )


def _position(knots: list[float], value: float) -> tuple[int, float]:
    """(left knot of the segment used, position along it: 0 … 1 inside, beyond that outside the knots)."""
    left = min(max(bisect_right(knots, value) - 1, 0), len(knots) - 2)
    return left, (value - knots[left]) / (knots[left + 1] - knots[left])
