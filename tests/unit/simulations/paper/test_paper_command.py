"""`prfaas simulate paper` as one types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from launcher.cli import main
from simulations.paper.published import DEPLOYMENTS

FIGURES = {
    "lambda_max", "theta_prfaas", "theta_pd_p", "theta_pd_d", "threshold_tokens", "n_prfaas", "n_p", "n_d",
    "offload_share", "egress_gbps", "ttft_mean_s", "ttft_p90_s",
}  # fmt: skip


def paper(*options: str) -> Result:
    return CliRunner().invoke(main, ["simulate", "paper", *options])


@pytest.fixture(scope="module")
def whole() -> Result:
    return paper("--json", "--requests", "60", "--seeds", "1", "--cores", "1")


def test_json_is_the_documented_object(whole: Result) -> None:
    assert whole.exit_code == 0, whole.output
    found = json.loads(whole.stdout)
    assert set(found) == {"analytic", "event_driven", "published", "error", "fitted"}
    for part in ("analytic", "event_driven", "published", "error"):
        assert set(found[part]) == set(DEPLOYMENTS)
        assert all(set(row) == FIGURES for row in found[part].values())
    assert found["error"]["prfaas_pd"]["lambda_max"] == pytest.approx(
        found["analytic"]["prfaas_pd"]["lambda_max"] / 3.24 - 1
    )
    assert "h20_profile.slope" in found["fitted"]


def test_queues_lower_every_rate(whole: Result) -> None:
    found = json.loads(whole.stdout)
    for name in DEPLOYMENTS:
        assert 0 < found["event_driven"][name]["lambda_max"] < found["analytic"][name]["lambda_max"]


def test_table_names_what_is_fitted_and_concludes() -> None:
    shown = paper("--model-only")
    assert shown.exit_code == 0
    for words in ("3.24", "19,400", "fitted", "within its bar", "1.54 times"):
        assert words in " ".join(shown.stdout.split())


def test_link_sweep_says_where_remote_prefill_stops_paying() -> None:
    shown = paper("--sweep", "link=1..100Gbps", "--points", "3")
    assert shown.exit_code == 0
    assert "below 4.2 Gbit/s" in " ".join(shown.stdout.split())
    found = json.loads(paper("--sweep", "link=1..100Gbps", "--points", "3", "--json").stdout)
    assert [row["link_gbps"] for row in found["points"]] == pytest.approx([1, 10, 100])


def test_link_sweep_can_be_replayed() -> None:
    options = (
        "--event-driven",
        "--points",
        "2",
        "--requests",
        "60",
        "--seeds",
        "1",
        "--cores",
        "1",
        "--json",
    )
    found = json.loads(paper("--sweep", "link=5..8Gbps", *options).stdout)
    for row in found["points"]:
        assert 0 < row["event_driven_lambda_max"] < row["lambda_max"]


def test_load_sweep_has_theory_beside_the_runs() -> None:
    options = (
        "--sweep",
        "load=0.3..0.6",
        "--points",
        "2",
        "--requests",
        "60",
        "--seeds",
        "1",
        "--cores",
        "1",
    )
    found = json.loads(paper(*options, "--json").stdout)
    assert [(row["deployment"], row["load"]) for row in found["points"]] == [
        (name, load) for load in (0.3, 0.6) for name in DEPLOYMENTS
    ]
    assert all(row["ttft_mean_s"] > 1 and row["theory_ttft_mean_s"] > 1 for row in found["points"])


@pytest.mark.parametrize("suffix", ["png", "html"])
def test_plot_is_written_and_needs_nothing_else(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"links.{suffix}"
    assert paper("--sweep", "link=1..100Gbps", "--points", "3", "--plot", str(path)).exit_code == 0
    content = path.read_bytes()
    if suffix == "png":
        assert content.startswith(b"\x89PNG")
    else:
        assert b"<script" in content
        assert b'src="http' not in content
        assert "link stops mattering" in content.decode()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--sweep", "link=0.."), "two ends"),
        (("--sweep", "rtt=1..2"), "unknown quantity"),
        (("--plot", "x.png"), "add --sweep"),
        (("--points", "5"), "add --sweep"),
        (("--sweep", "link=1..9Gbps", "--plot", "x.pdf"), "must end in .png or .html"),
        (("--sweep", "link=1..9Gbps", "--plot", "/no/such/folder/x.png"), "no folder"),
        (("--sweep", "load=0.1..0.5", "--model-only"), "leave out --model-only"),
        (("--event-driven",), "is for --sweep link"),
    ],
)
def test_nonsense_ends_in_one_line_and_exit_code_2(options: tuple[str, ...], says: str) -> None:
    found = paper(*options)
    assert found.exit_code == 2
    assert says in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1
    assert not found.stdout
