"""The commands end to end, in process, on a small made-up workload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from launcher.cli import main
from policies.types import PlacementKind
from router.core.decision import Decision
from router.core.journal import replay

TRACE = "generate:lognormal?requests=60&rate=2&mu=7&output_tokens=40"
BASE = ("--trace", TRACE, "--fleet", "small", "--seed", "3")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *arguments], catch_exceptions=False)


def summary(*arguments: str) -> dict[str, Any]:
    result = run("replay", *BASE, *arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_replay_prints_one_json_object_by_the_names_people_know() -> None:
    found = summary("--policy", "always_remote")
    assert (found["requests"], found["served"], found["policy"]) == (60, 60, "always_remote")
    for latency in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        assert list(found[latency]) == ["mean", "p50", "p75", "p90", "p99", "max"]
        assert 0 < found[latency]["p50"] <= found[latency]["p99"] <= found[latency]["max"]
    assert found["placement"]["remote"] == 1.0
    assert found["slo_met"] is True


def test_the_same_seed_gives_the_same_figures() -> None:
    first, second = summary(), summary()
    assert first.pop("cpu_s") > 0
    second.pop("cpu_s")
    assert first == second


def test_tables_say_what_json_says() -> None:
    text = run("replay", *BASE, "--policy", "always_local").stdout
    assert "60 of 60 served" in text
    assert "always_local on small" in text
    assert "service levels: met" in text


def test_first_and_rate_and_warm_up_shape_the_trace() -> None:
    assert summary("--first", "20")["requests"] == 20
    assert summary("--rate", "5")["offered_rps"] == pytest.approx(5.0)
    assert summary("--warm-up", "0.5")["requests"] == 30


def test_a_thinner_link_moves_work_off_it() -> None:
    wide, thin = summary(), summary("--link", "wan=10Mbit")
    assert wide["placement"]["remote"] > 0
    assert thin["placement"]["remote"] < wide["placement"]["remote"]


def test_out_and_journal_hold_every_request_and_the_journal_replays_to_the_same_places(
    tmp_path: Path,
) -> None:
    out, journal = tmp_path / "rows.jsonl", tmp_path / "inputs.jsonl"
    summary("--out", str(out), "--journal", str(journal))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    with journal.open("rb") as lines:
        decisions = [decision for decision in replay(lines) if isinstance(decision, Decision)]
    placed = [(row["kind"], row["decode"], row["site"]) for row in rows]
    assert placed == [(PlacementKind(d.kind).label, d.decode, d.site) for d in decisions]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inputs.jsonl", "rows.jsonl"]


def test_ctrl_c_shows_what_is_known_marked_as_partial() -> None:
    policy = "interrupting_policy:Interrupting:after=40"
    result = run("replay", *BASE, "--policy", policy, "--json")
    assert result.exit_code == 130
    found = json.loads(result.stdout)
    assert found["complete"] is False
    assert 0 < found["served"] < 60
    assert found["slo_met"] is None
    assert "partial" in result.stderr
    assert "PARTIAL" in run("replay", *BASE, "--policy", policy).stdout


def test_compare_puts_the_best_first_and_names_the_bound() -> None:
    result = run("compare", *BASE, "--policies", "round_robin,cost_model", "--jobs", "1", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    shares = [one["good_share"] for one in found["runs"]]
    assert shares == sorted(shares, reverse=True)
    assert {one["policy"] for one in found["runs"]} == {"round_robin", "cost_model"}
    assert all(0 < one["achieved_over_bound"] <= 1 for one in found["runs"])
    assert found["bound"]["rps"] > 0
    assert found["findings"][0]["text"]


def test_compare_gives_each_policy_the_figures_that_replay_gives_it() -> None:
    result = run("compare", *BASE, "--policies", "threshold:tokens=900,cost_model", "--jobs", "2", "--json")
    by_policy = {one["policy"]: one for one in json.loads(result.stdout)["runs"]}
    alone = summary("--policy", "threshold:tokens=900")
    together = by_policy["threshold:tokens=900"]
    alone.pop("cpu_s")
    assert {key: together[key] for key in alone} == alone


def test_compare_after_ctrl_c_shows_the_runs_that_began() -> None:
    policies = "cost_model,interrupting_policy:Interrupting:after=40,always_local"
    result = run("compare", *BASE, "--policies", policies, "--jobs", "1", "--json")
    assert result.exit_code == 130
    found = json.loads(result.stdout)
    assert {one["policy"]: one["complete"] for one in found["runs"]} == {
        "cost_model": True,
        "interrupting_policy:Interrupting:after=40": False,
    }
    assert "without always_local" in result.stderr


def test_reports_are_written_by_both_commands(tmp_path: Path) -> None:
    for command, arguments in (
        ("replay", ()),
        ("compare", ("--policies", "cost_model,random", "--jobs", "1")),
    ):
        folder = tmp_path / command
        assert run(command, *BASE, *arguments, "--report", str(folder)).exit_code == 0
        assert (folder / "index.html").stat().st_size > 1_000_000
        assert json.loads((folder / "report.json").read_text())["bound"]["rps"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--policy", "cost_modle"), "did you mean `cost_model`"),
        (("--policy", "threshold:tokns=5"), "tokns"),
        (("--fleet", "smal"), "small"),
        (("--trace", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--trace", "generate:lognormal?request=5"), "request"),
        (("--link", "lan=5Gbit"), "no link `lan`"),
        (("--rate", "-1"), "--rate"),
        (("--out", "rows.csv"), ".parquet or .jsonl"),
        (("--report", "/proc/no/such/folder"), "make it first"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: tuple[str, ...], words: str) -> None:
    result = run("replay", *BASE, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in result.stderr
    assert result.stderr.startswith("prfaas: ")
    assert len(result.stderr.splitlines()) == 1


def test_a_malformed_trace_is_named_by_file_line_and_field_and_leaves_no_report(tmp_path: Path) -> None:
    trace = tmp_path / "bad.jsonl"
    good = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
    trace.write_text(good + good.replace("600", "-600"))
    result = run("replay", "--trace", str(trace), "--fleet", "small", "--report", str(tmp_path / "report"))
    assert result.exit_code == 2
    assert "bad.jsonl" in result.stderr
    assert "2" in result.stderr
    assert "input_length" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl"]


@pytest.mark.parametrize(
    "command", [("replay", "--bound"), ("compare", "--policies", "always_local", "--jobs", "1")]
)
def test_ctrl_c_while_the_bound_is_computed_keeps_the_runs(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("simulations.commands.study.fluid_bound", interrupted)
    result = run(*command, *BASE)
    assert result.exit_code == 130
    assert "always_local" in result.stdout or "60 of 60 served" in result.stdout
    assert "stopped before the rate that no policy can exceed was known" in result.stderr


def test_the_report_of_capacity_has_its_chart_and_compares_at_the_highest_rate(tmp_path: Path) -> None:
    command = ("capacity", *BASE, "--policies", "always_local,round_robin", "--tolerance", "0.3")
    found = run(*command, "--slo", "ttft_p90=5s", "--json", "--report", str(tmp_path / "out"))
    assert found.exit_code == 0, found.output
    rates = {one["policy"]: one["rate_per_s"] for one in json.loads(found.stdout)["policies"]}
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    summaries = [one["summary"] for one in report["runs"]]
    assert {one["policy"]: one["capacity_rps"] for one in summaries} == rates
    assert all(one["offered_rps"] == pytest.approx(max(rates.values())) for one in summaries)
    assert "capacity" in [chart["key"] for chart in report["charts"]]
    refused = run(*command, "--cheapest", "--rate", "2", "--report", str(tmp_path / "other"))
    assert (refused.exit_code, "leave it or --cheapest out" in refused.stderr) == (2, True)
