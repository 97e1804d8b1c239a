"""Shipped fleets are what comparisons rely on; every contradiction in a fleet file is named."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from prfaas.errors import ConfigError
from simulations.fleet import Fleet
from simulations.fleet_load import check_fits, dump_fleet, load_fleet, loads_fleet, shipped_fleets
from simulations.hardware.profiles import hardware_of, shipped_hardware, step_times
from simulations.workload.trace import Trace

LINEAR = {
    "prefill_base_s": 0.01, "prefill_token_s": 1e-4, "prefill_context_s": 0.0,
    "decode_base_s": 0.02, "decode_sequence_s": 0.0, "decode_context_s": 0.0,
}  # fmt: skip
TABLE_WITH_READ = {"table": "a/b/1", "kv_tokens": 4096, "prefill_read_s": 1e-4}
TREE: dict[str, Any] = {
    "name": "test",
    "model": {"name": "m", "layers": 2, "kv_bytes_per_token": 100},
    "clusters": {
        "pd": {"kind": "pd", "workers": {"decode": {"role": "decode", "hardware": "own", "count": 2}}},
        "far": {"kind": "prefill", "workers": {"remote": {"role": "prefill", "hardware": "own"}}},
    },
    "links": {"wan": {"between": ["pd", "far"], "capacity": "10Gbit", "rtt": "10ms"}},
    "hardware": {"own": {"linear": LINEAR, "kv_tokens": 4096}},
    "slo": {"ttft_p90": "2s"},
}


def changed(path: str, value: object) -> str:
    """YAML of `TREE` with the field at `path` set, or removed (None)."""
    tree = copy.deepcopy(TREE)
    at: Any = tree
    *parents, last = path.split("/")
    for part in parents:
        at = at[int(part)] if isinstance(at, list) else at.setdefault(part, {})
    if value is None:
        del at[last]
    else:
        at[last] = value
    return yaml.safe_dump(tree)


def test_the_shipped_fleets() -> None:
    assert shipped_fleets() == ["dense", "hybrid", "small"]
    shapes = {}
    for name in shipped_fleets():
        fleet = load_fleet(name)
        assert fleet.name == name
        assert loads_fleet(dump_fleet(fleet)) == fleet
        shapes[name] = [
            (cluster_name, group, workers.count, workers.hardware)
            for cluster_name, cluster in fleet.clusters.items()
            for group, workers in cluster.workers.items()
        ]
    assert shapes["hybrid"] == [
        ("pd", "prefill", 3, "paper-1t-h20"), ("pd", "decode", 5, "paper-1t-h20"),
        ("prfaas", "remote", 4, "paper-1t-h200"),
    ]  # fmt: skip
    assert shapes["dense"] == [
        ("pd", "prefill", 6, "llama-3.1-70b-h100-tp4"), ("pd", "decode", 6, "llama-3.1-70b-h100-tp4"),
        ("prfaas", "remote", 4, "llama-3.1-70b-h200-tp8"),
    ]  # fmt: skip
    assert shapes["small"] == [
        ("pd", "prefill", 4, "llama-3.1-8b-l40s"), ("pd", "decode", 8, "llama-3.1-8b-l40s"),
        ("prfaas", "remote", 2, "llama-3.1-8b-h100"),
    ]  # fmt: skip
    slos = {name: (load_fleet(name).slo.ttft_p90, load_fleet(name).slo.tpot_p90) for name in shapes}
    assert slos == {"hybrid": (10.0, 0.04), "dense": (3.0, 0.05), "small": (5.0, 0.06)}


def test_the_papers_instance_has_the_papers_figures() -> None:
    fleet = load_fleet("hybrid")
    remote = fleet.clusters["prfaas"].workers["remote"]
    pool, decode = fleet.clusters["pd"].workers["prefill"], fleet.clusters["pd"].workers["decode"]
    h200 = step_times(hardware_of(fleet, remote), "h200")
    h20 = step_times(hardware_of(fleet, pool), "h20")
    for length, seconds, mib in (
        (1024, 0.44, 190.8),
        (8192, 0.72, 308.9),
        (32_768, 1.84, 701.3),
        (131_072, 7.40, 2316.3),
    ):
        assert h200.prefill_s(length, 0) == pytest.approx(seconds)
        assert h20.prefill_s(length, 0) == pytest.approx(2.946 * seconds - 0.590, abs=1e-4)
        size = (length * fleet.model.kv_bytes_per_token + fleet.model.state_bytes) / 2**20
        assert size == pytest.approx(mib, rel=0.015)
    # 5 decode instances: 20 sequences each at 25 ms, answers of 1024 tokens → 3.91 requests per second.
    line = h20.decode_line(decode.max_running, 1e6)
    step_s = line.base_s + line.slope_s * 1e6
    assert 5 * decode.max_running / (step_s * 1024) == pytest.approx(3.906, abs=0.001)


def test_every_shipped_profile_makes_step_times_and_has_a_price() -> None:
    fleet = load_fleet("small")
    for name in shipped_hardware():
        workers = fleet.clusters["pd"].workers["decode"]
        spec = hardware_of(fleet, type(workers)(role="decode", hardware=name))
        assert spec.price_per_hour > 0
        assert step_times(spec, name).prefill_s(10_000, 0) > 0


def test_a_fleet_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(TREE))
    assert isinstance(load_fleet(path), Fleet)
    assert load_fleet(str(path)).links["wan"].capacity == 1.25e9


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (
            "clusters/pd/workers/decode/hardware",
            "ownn",
            r"`clusters.pd.workers.decode.hardware`.*did you mean `own`",
        ),
        ("clusters/pd/workers/decode/machine", "box", r"`clusters.pd.workers.decode.machine` is box"),
        ("machines", {"box": {"beside_prefill": -1.0}}, r"`machines.box.beside_prefill` must be 0"),
        ("hardware/own", TABLE_WITH_READ, r"hardware `own`: `prefill_read_s` goes with `linear` alone"),
        ("hardware/own/prefill_read_s", -1.0, r"hardware.prefill_read_s` must be 0"),
        ("clusters/pd/workers/decode/role", "decoder", r"`clusters.pd.workers.decode.role`"),
        ("clusters/pd/workers/decode/role", "prefill", r"kind pd and has no decode worker"),
        ("clusters/far/workers/remote/role", "decode", r"`clusters.far.workers.remote.role` is decode"),
        ("clusters/pd/workers/decode/count", 0, r"`clusters.pd.workers.decode.count` must be 1"),
        ("clusters/pd/workers/decode/cuont", 2, r"unknown field `clusters.pd.workers.decode.cuont`.*`count`"),
        (
            "clusters/far/workers/decode-1",
            {"role": "prefill", "hardware": "own"},
            r"worker decode-1 is in clusters",
        ),
        ("clusters/pd/local_rate", "fast", r"`clusters.pd.local_rate`"),
        ("clusters/pd", None, r"no cluster of kind pd"),
        ("clusters", None, r"`clusters` is missing"),
        ("links/wan/between", ["pd", "fra"], r"`links.wan.between` names fra, which is no cluster"),
        ("links/wan/capacity", 10, r"`links.wan.capacity`: .*needs a unit"),
        ("links/wan/capacity", "0Gbit", r"`links.wan.capacity` must be above 0"),
        ("links", None, r"no link joins clusters pd and far"),
        (
            "hardware/own/kv_tokens",
            100,
            r"`hardware.own.kv_tokens` is 100: less than one page|hardware.*kv_tokens. is 100",
        ),
        ("hardware/own/linear/prefill_base_s", None, r"`linear.prefill_base_s` is missing"),
        ("hardware/own/linear/prefil_base_s", 1.0, r"did you mean `prefill_base_s`"),
        ("hardware/own/linear/decode_base_s", -1.0, r"`linear.decode_base_s` must be 0"),
        ("hardware/own/linear", {}, r"has none of them"),
        ("hardware/own/table", "a/b/1", r"it has linear, table"),
        ("hardware/own/points", {"prefill": [[1, 1], [2, 2]]}, r"unknown field `linear.prefill_base_s`"),
        ("hardware/own/decode_scale", 0.0, r"decode_scale` must be"),
        ("page_size", 0, r"`page_size` must be 1"),
        ("model/layers", 0, r"`model.layers` must be 1"),
        ("model/state_bytes", -1, r"`model.state_bytes`"),
        ("slo/ttft_p90", "0s", r"`slo.ttft_p90` must be above 0"),
        ("slo/ttft_p95", "1s", r"unknown field `slo.ttft_p95`"),
        ("scheduler", {"max_laod": 0.5}, r"`scheduler.max_laod`.*did you mean `max_load`"),
        ("scheduler", {"max_load": "much"}, r"`scheduler`: "),
        (
            "schedule",
            [{"at": 5, "link": "wna", "capacity": "0"}],
            r"`schedule\[0\].link` is wna.*did you mean `wan`",
        ),
        ("schedule", [{"at": 5, "link": "wan", "capacity": "slow"}], r"`schedule\[0\].capacity`"),
        (
            "schedule",
            [{"at": 5, "worker": "decode-2"}],
            r"`schedule\[0\].worker` is decode-2, which is no worker",
        ),
        ("schedule", [{"at": -1, "worker": "decode-0"}], r"`schedule\[0\].at`"),
        ("schedule", [{"at": 1, "capacity": "1Gbit"}], r"without `link`"),
        ("status_period", 0, r"`status_period` must be"),
    ],
)
def test_each_contradiction_names_file_and_field(path: str, value: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        loads_fleet(changed(path, value), "mine.yaml")
    assert str(caught.value).startswith("mine.yaml: ")


@pytest.mark.parametrize(
    "points",
    [[[1, 1]], [[1, 1], [1, 2]], [[1, 2], [2, 1]], [[1, 1, 1], [2, 2, 2]], [[1, float("nan")], [2, 2]]],
)
def test_points_must_rise(points: list[list[float]]) -> None:
    decode = {name: value for name, value in LINEAR.items() if name.startswith("decode")}
    text = changed("hardware/own", {"points": {"prefill": points}, "linear": decode, "kv_tokens": 4096})
    with pytest.raises(ConfigError, match=r"points.prefill"):
        loads_fleet(text)


def test_good_schedules_pass() -> None:
    schedule = [
        {"at": "10s", "link": "wan", "capacity": "0"},
        {"at": "20s", "link": "wan", "capacity": "5Gbit"},
        {"at": "30s", "worker": "decode-1"},
        {"at": "40s", "worker": "decode-1", "up": True},
        {"at": "50s", "router_lag": "2s"},
    ]
    assert len(loads_fleet(changed("schedule", schedule)).schedule) == 5


def test_no_fleet_of_that_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no fleet `hybird`; did you mean `hybrid`"):
        load_fleet("hybird")
    with pytest.raises(ConfigError, match="cannot read"):
        load_fleet(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="line 1"):
        loads_fleet("a: [")


def _trace(prompts: list[int], answers: list[int]) -> Trace:
    return Trace("t", np.arange(len(prompts), dtype=float), np.array(prompts), np.array(answers))


def test_a_fleet_that_cannot_hold_one_request_is_refused() -> None:
    fleet = loads_fleet(yaml.safe_dump(TREE))
    check_fits(fleet, _trace([10, 3000], [5, 1096]))  # exactly the pool: 4096 tokens, 8 pages of 512
    with pytest.raises(
        ConfigError, match=r"fleet test: request 1 of t .*4608 tokens.*clusters.pd.workers.decode.*4096"
    ):
        check_fits(fleet, _trace([10, 3000], [5, 1097]))
    with pytest.raises(ConfigError, match=r"request 0 .*`model.context_length` is 131072"):
        check_fits(fleet, _trace([131_072], [5]))
