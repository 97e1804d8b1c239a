"""One request of the demo: what was asked, what the gateway decided, what came back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from router.decision_log import DecisionRecord

KINDS = ("reuse", "local", "pool", "remote")
PLACES = ("local", "pool", "remote")
"""Where a prompt can be computed: `local` stands for `reuse` too, which differs in what is cached there."""
_WHY_CANDIDATES = 3
_MOST_TERMS = 2
_WORTH_SHOWING = 0.1
"""Share of a cost from which on a term is named."""


@dataclass(slots=True)
class Record:
    """Filled in as the request proceeds; `decision` is the last attempt's."""

    number: int
    work: str
    max_tokens: int
    messages: list[dict[str, str]] = field(default_factory=list)
    prompt: str = ""
    """Of a raw prompt; empty for a chat."""
    state: str = "sent"
    """`sent`, `answering`, `done` or `error`."""
    request_id: str = ""
    ttft_s: float | None = None
    """As the client saw it."""
    total_s: float | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str = ""
    decision: DecisionRecord | None = None

    @property
    def kind(self) -> str:
        return self.decision.kind if self.decision else ""

    @property
    def predicted_ttft_s(self) -> float | None:
        return self.decision.predicted_ttft_s if self.decision else None

    @property
    def actual_ttft_s(self) -> float | None:
        """From the last body byte read to the first content byte written, at the gateway."""
        return self.decision.ttft_s if self.decision else None

    @property
    def prediction_error(self) -> float | None:
        """|predicted - actual| / actual TTFT; None until both are known."""
        predicted, actual = self.predicted_ttft_s, self.actual_ttft_s
        return abs(predicted - actual) / actual if predicted is not None and actual else None

    @property
    def uncached_tokens(self) -> int | None:
        """Prompt tokens that the chosen site had to compute."""
        return int(self.decision.decision["chosen"]["uncached_tokens"]) if self.decision else None

    @property
    def kv_bytes(self) -> int:
        """KV bytes that were written to the decode worker for this request."""
        report = self.decision.report if self.decision else None
        return report.kv_bytes if report else 0

    @property
    def cost_was_least(self) -> bool | None:
        """Whether no logged candidate cost less than the chosen one; None without a decision."""
        if self.decision is None:
            return None
        record = self.decision.decision
        return bool(record["chosen"]["cost_s"] <= min(row["cost_s"] for row in record["candidates"]))

    @property
    def why(self) -> str:
        """The best candidates, cheapest first, with the main terms of the best."""
        return explain(self.candidates)

    @property
    def candidates(self) -> list[dict[str, Any]]:
        """Logged candidates in order of cost, as rows of `Decision.as_record`."""
        return list(self.decision.decision["candidates"]) if self.decision else []

    @property
    def main_terms(self) -> str:
        """What the chosen candidate's cost mainly consists of."""
        return main_terms(self.decision.decision["chosen"]) if self.decision else ""


def explain(candidates: Sequence[dict[str, Any]]) -> str:
    """`remote 1.9s (prefill 1.5 wait .20) < pool 3.1s < local 4.0s`: costs in seconds, cheapest first.

    Args:
        candidates: rows of `Decision.as_record`, in order of cost.
    """
    shown = [f"{row['kind']} {row['cost_s']:.1f}s" for row in candidates[:_WHY_CANDIDATES]]
    if shown and (terms := main_terms(candidates[0])):
        shown[0] += f" ({terms})"
    return " < ".join(shown)


def main_terms(row: dict[str, Any]) -> str:
    """`prefill 5.4 others 1.9`: what a candidate's cost mainly consists of, in seconds, largest first.

    `step` is all that follows the prefill and its transfer until the first token, `others` the delay that the
    placement imposes on other requests.
    """
    until_ready_s = row["start_s"] + row["prefill_s"] + row["transfer_s"]
    terms = {
        "wait": row["start_s"],
        "prefill": row["prefill_s"],
        "link": row["transfer_s"],
        "step": row["ttft_s"] - until_ready_s,
        "others": row["cost_s"] - row["ttft_s"],
    }
    largest_first = sorted(terms.items(), key=lambda term: -term[1])
    least_s = _WORTH_SHOWING * row["cost_s"]
    named = [f"{word} {_short(seconds)}" for word, seconds in largest_first if seconds >= least_s > 0]
    return " ".join(named[:_MOST_TERMS])


def cost_by_place(candidates: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Least cost in seconds by place of `PLACES`; a place without a candidate is left out."""
    costs: dict[str, float] = {}
    for row in candidates:
        place = "local" if row["kind"] == "reuse" else row["kind"]
        costs[place] = min(row["cost_s"], costs.get(place, row["cost_s"]))
    return costs


def _short(seconds: float) -> str:
    """`.25`, `1.5`, `12`: two digits that matter."""
    if seconds < 1:
        return f"{seconds:.2f}".lstrip("0")
    return f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"
