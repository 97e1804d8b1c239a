from __future__ import annotations

import io
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from launcher.demo.client import parse_decisions
from launcher.demo.live import LiveTable, plain_line, records_table
from launcher.demo.parity import NEAR_TIE, Parity, judge, without_end
from launcher.demo.records import Record, cost_by_place, explain, main_terms
from launcher.demo.summary import hidden_fraction, print_summary, quantile, summarize
from prfaas.protocol.messages import PrefillReport, TokenLogprobs
from router.decision_log import DecisionRecord

TERMS = (
    "start_s",
    "prefill_s",
    "transfer_s",
    "slot_s",
    "step_s",
    "ttft_s",
    "interference_s",
    "externality_s",
)


def row(kind: str, cost_s: float, **terms: float) -> dict[str, Any]:
    return {"kind": kind, "cost_s": cost_s, "uncached_tokens": 100, **dict.fromkeys(TERMS, 0.0), **terms}


def decision(kind: str = "remote", *, kv_bytes: int = 0, **changes: Any) -> DecisionRecord:
    candidates = changes.pop("candidates", [row(kind, 1.0), row("local", 2.0)])
    report = PrefillReport(
        site="s", cached_tokens=20, decode_cached_tokens=0, computed_tokens=80,
        queue_s=0.0, prefill_s=1.0, ready_s=1.1, kv_bytes=kv_bytes,
    )  # fmt: skip
    fields: dict[str, Any] = {
        "request_id": "r-0", "attempt": 1, "time_unix_s": 0.0, "calibration": False, "prompt_tokens": 100,
        "max_tokens": 8, "kind": kind, "decode": "decode-0", "site": "s", "link": "wan",
        "predicted_ttft_s": 1.0,
        "decision": {"chosen": candidates[0], "candidates": candidates}, "overhead_s": {}, "outcome": "ok",
        "report": report, "ttft_s": 1.25, "hidden_fraction": None, "total_s": 2.0,
    }  # fmt: skip
    return DecisionRecord(**{**fields, **changes})


def record(number: int, made: DecisionRecord | None, **changes: Any) -> Record:
    return Record(number=number, work="document", max_tokens=8, decision=made, state="done", **changes)


def likeliest(*pairs: tuple[int, float]) -> TokenLogprobs:
    return TokenLogprobs(logprob=pairs[0][1], top=pairs)


CLEAR = likeliest((1, -0.1), (2, -3.0))
TIED = likeliest((1, -0.7), (2, -0.7 - NEAR_TIE / 2))


@pytest.mark.parametrize(
    ("answer", "reference", "logprobs", "verdict"),
    [
        ([1, 2, 3], [1, 2, 3], [CLEAR] * 3, "same"),
        ([1, 2, 9], [1, 2, 3], [CLEAR, CLEAR, TIED], "near_tie"),
        ([1, 2, 9], [1, 2, 3], [CLEAR, CLEAR, CLEAR], "different"),
        ([9, 2, 8], [1, 2, 3], [CLEAR, CLEAR, TIED], "different"),
        ([9, 5, 8], [1, 2, 3], [TIED, CLEAR, CLEAR], "near_tie"),
        ([1, 2], [1, 2, 3], [CLEAR, CLEAR, TIED], "near_tie"),
        ([1, 2], [1, 2, 3], [CLEAR] * 3, "different"),
        ([1, 2, 3], [1, 2], [TIED] * 2, "different"),
        ([], [], [], "same"),
    ],
)
def test_parity_is_judged_at_the_first_difference(
    answer: list[int], reference: list[int], logprobs: list[TokenLogprobs], verdict: str
) -> None:
    assert judge(answer, reference, logprobs) == verdict


def test_an_end_token_is_no_difference() -> None:
    assert without_end([5, 2], (2, 3)) == without_end([5], (2, 3)) == [5]
    assert without_end([2, 5], (2, 3)) == [2, 5]


def test_the_best_candidates_are_told_with_the_terms_of_the_cheapest() -> None:
    rows = [
        row("remote", 1.94, start_s=0.2, prefill_s=1.5, transfer_s=0.1, ttft_s=1.9),
        row("pool", 3.1, prefill_s=3.0),
        row("local", 4.04),
        row("pool", 9.0),
    ]
    assert explain(rows) == "remote 1.9s (prefill 1.5 wait .20) < pool 3.1s < local 4.0s"
    assert explain([]) == ""


def test_terms_are_named_largest_first_with_what_others_suffer() -> None:
    assert main_terms(row("pool", 6.0, start_s=0.5, prefill_s=1.0, ttft_s=2.0)) == "others 4.0 prefill 1.0"
    assert main_terms(row("local", 12.0, prefill_s=0.5, ttft_s=12.0)) == "step 12"
    assert main_terms(row("local", 0.0)) == ""


def test_each_place_costs_what_its_cheapest_candidate_does() -> None:
    rows = [row("reuse", 0.5), row("pool", 1.0), row("pool", 2.0), row("local", 3.0)]
    assert cost_by_place(rows) == {"local": 0.5, "pool": 1.0}


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 1))
def test_a_quantile_lies_within_the_values_and_grows_with_its_share(
    values: list[float], share: float
) -> None:
    found = quantile(values, share)
    lowest, highest = quantile(values, 0), quantile(values, 1)
    assert found is not None
    assert lowest == min(values)
    assert highest == max(values)
    assert min(values) - 1e-6 <= found <= max(values) + 1e-6


def test_the_quantile_of_nothing_is_unknown() -> None:
    assert quantile([], 0.5) is None


def test_hidden_fraction_is_weighted_by_bytes_over_links_only() -> None:
    records = [
        record(1, decision(kv_bytes=300, hidden_fraction=1.0)),
        record(2, decision(kv_bytes=100, hidden_fraction=0.2)),
        record(3, decision("pool", kv_bytes=900, link=None, hidden_fraction=None)),
        record(4, None),
    ]
    assert hidden_fraction(records) == pytest.approx(0.8)
    assert hidden_fraction(records[2:]) is None


def test_the_final_object_counts_kinds_errors_bytes_and_the_share_placed_at_least_cost() -> None:
    dear = [row("local", 2.0), row("remote", 1.0)]
    records = [
        record(1, decision("remote", kv_bytes=4_000_000, hidden_fraction=0.95)),
        record(2, decision("pool", kv_bytes=1000, link=None)),
        record(3, decision("local", candidates=dear, attempt=2)),
        record(4, None, error="503"),
    ]
    figures = summarize(records, Parity(same=2, near_tie=1), {"over_context": 3}, 12.34)
    assert list(figures)[:10] == [
        "requests", "errors", "placements", "ttft_p50_s", "ttft_p90_s", "kv_bytes", "hidden_fraction",
        "prediction_error_p50", "argmin_share", "parity",
    ]  # fmt: skip
    assert (figures["requests"], figures["errors"]) == (4, 1)
    assert figures["placements"] == {"reuse": 0, "local": 1, "pool": 1, "remote": 1}
    assert figures["kv_bytes"] == {"wan": 4_000_000, "in_cluster": 1000}
    assert figures["ttft_p50_s"] == 1.25
    assert figures["prediction_error_p50"] == 0.2
    assert figures["argmin_share"] == pytest.approx(2 / 3, abs=1e-3)
    assert figures["parity"] == {"same": 2, "near_tie": 1, "different": 0}
    assert figures["attempts_over_one"] == 1
    assert figures["skipped"] == {"over_context": 3}
    assert json.loads(json.dumps(figures)) == figures


def test_figures_of_no_request_are_unknown_and_still_printable() -> None:
    figures = summarize([], Parity(), {}, 0.0)
    assert figures["ttft_p50_s"] is None
    assert figures["argmin_share"] is None
    console = Console(file=io.StringIO(), width=120)
    print_summary(console, [], figures)


def test_the_summary_says_what_moved_how_predictions_did_and_whether_answers_agree() -> None:
    records = [record(1, decision("remote", kv_bytes=4_000_000, hidden_fraction=0.95))]
    console = Console(file=(stream := io.StringIO()), width=120)
    print_summary(console, records, summarize(records, Parity(same=1), {"over context": 3}, 1.0))
    words = " ".join(stream.getvalue().split())
    for part in (
        "4.0 MB over link wan",
        "95 % behind prefill",
        "20 % off",
        "100 % of requests",
        "3 over context",
        "1 answers the",
    ):
        assert part in words
    assert "failed" not in words


def test_the_gateways_decisions_are_read_with_the_last_attempt_winning() -> None:
    newest_first = [decision(attempt=2, kind="pool"), decision(attempt=1)]
    body = msgspec.json.encode({"decisions": newest_first})
    assert [(read.attempt, read.kind) for read in parse_decisions(body)] == [(1, "remote"), (2, "pool")]


def shown(console: Console, renderable: object) -> str:
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_the_table_shows_placement_reason_bytes_and_both_ttfts() -> None:
    console = Console(width=200, force_terminal=False)
    candidates = [row("remote", 1.0, prefill_s=0.9, ttft_s=1.0), row("local", 2.0)]
    placed = record(7, decision(kv_bytes=46_000_000, candidates=candidates), text="The answer\nis long")
    text = shown(console, records_table([placed], "title"))
    for part in (
        "7",
        "document",
        "remote",
        "1.00",
        "2.00",
        "prefill .90",
        "100",
        "46.0",
        "1.25",
        "The answer is long",
    ):
        assert part in text


@pytest.mark.parametrize("width", [100, 120, 180])
def test_no_figure_of_the_table_is_cut_off(width: int) -> None:
    costly = [row("remote", 123.45, prefill_s=88.8, ttft_s=90.0), row("pool", 123.99), row("local", 124.0)]
    made = decision(kv_bytes=123_400_000, candidates=costly, predicted_ttft_s=90.25, ttft_s=101.75)
    console = Console(width=width)
    lines = shown(
        console, records_table([record(32, made, text="Paris")], "t", terms=width > 110)
    ).splitlines()
    assert all(part in lines[-1] for part in ("32", "123.45", "123.99", "124.00", "123.4", "90.25", "101.75"))
    assert ("prefill 89 others 33" in lines[-1]) == (width > 110)
    assert "Paris" in lines[-1]


def test_markup_in_an_answer_is_shown_as_it_is() -> None:
    placed = record(1, decision(), text="[/red] [bold]")
    assert "[/red] [bold]" in shown(Console(width=200), records_table([placed], "title"))


def test_without_a_terminal_every_finished_request_is_printed_once() -> None:
    stream = io.StringIO()
    records = [record(1, decision()), record(2, None), record(3, None, error="boom")]
    records[2].state = "error"
    with LiveTable(Console(file=stream, width=100), 3) as table:
        table.update(records)
        table.update(records)
    lines = stream.getvalue().splitlines()
    assert [line[:2] for line in lines] == ["#1", "#3"]
    assert lines[0] == plain_line(records[0])
    assert "ERROR boom" in lines[1]
