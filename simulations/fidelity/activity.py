"""What each worker did when, as far as recorded requests tell."""

from __future__ import annotations

from collections.abc import Sequence

from simulations.fidelity.recording import Row

Span = tuple[float, float]
"""(begin, end), seconds."""


class Activity:
    """When workers computed prompts and when they decoded."""

    def __init__(self, rows: Sequence[Row]) -> None:
        prefill: dict[str, list[Span]] = {}
        decode: dict[str, list[Span]] = {}
        for row in rows:
            if not row.complete or row.report is None:
                continue
            if row.report.prefill_s > 0:
                prefill.setdefault(row.site, []).append(prefill_span(row))
            decode.setdefault(row.decode, []).append(
                (row.arrival_s + row.report.ready_s, row.arrival_s + row.end_s)
            )
        self._prefill = {name: _union(spans) for name, spans in prefill.items()}
        self._decode = {name: _union(spans) for name, spans in decode.items()}

    def beside(self, worker: str, begin_s: float, end_s: float) -> tuple[float, float]:
        """(other workers that compute prompts, others that only decode), on average over a time."""
        length_s = end_s - begin_s
        if length_s <= 0:
            return 0.0, 0.0
        computing = decoding = 0.0
        for other in self._prefill.keys() | self._decode.keys():
            if other != worker:
                busy_s = sum(overlap_s(begin_s, end_s, *span) for span in self._prefill.get(other, ()))
                batch_s = sum(overlap_s(begin_s, end_s, *span) for span in self._decode.get(other, ()))
                computing += busy_s
                # Of a worker that does both, the chunks are taken to fall among the decodes.
                decoding += max(0.0, batch_s - busy_s)
        return computing / length_s, decoding / length_s


def prefill_span(row: Row) -> Span:
    """First chunk … last layer. Its end is known by when the KV had landed: with the last bytes, or as long
    after the first chunk as the transfer took."""
    report = row.report
    assert report is not None
    begin_s = row.arrival_s + report.ready_s - max(report.prefill_s, report.transfer_s)
    return begin_s, begin_s + report.prefill_s


def mean_batch(rows: Sequence[Row], begin_s: float, end_s: float) -> tuple[float, float]:
    """(sequences, tokens in all) that were decoded of `rows`, on average over a time."""
    batch = context = 0.0
    for row in rows:
        first_s, last_s = row.arrival_s + row.ttft_s, row.arrival_s + row.end_s
        share = overlap_s(begin_s, end_s, first_s, last_s) / (end_s - begin_s)
        batch += share
        context += share * (row.prompt_tokens + row.completion_tokens / 2)
    return batch, context


def overlap_s(a: float, b: float, c: float, d: float) -> float:
    """Seconds that [a, b] and [c, d] have in common."""
    return max(0.0, min(b, d) - max(a, c))


def _union(spans: list[Span]) -> list[Span]:
    """Joined where they overlap."""
    joined: list[Span] = []
    for begin_s, end_s in sorted(spans):
        if joined and begin_s <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end_s)
        else:
            joined.append((begin_s, end_s))
    return joined
