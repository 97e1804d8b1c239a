"""Reading cost tables, and the shipped fits against them (skipped without the data folder)."""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec
import numpy as np
import pytest
from simulation_data import needs_data

from prfaas.errors import ConfigError
from simulations.data_folder import data_folder
from simulations.fleet_load import load_fleet
from simulations.hardware.fit import fit_profile, profile_yaml
from simulations.hardware.profiles import hardware_of, step_times
from simulations.hardware.table_times import TableStepTimes
from simulations.hardware.tables import kv_capacity_tokens, load_table

FITTED = {
    "llama-3.1-8b-l40s": "meta-llama/Meta-Llama-3.1-8B/l40s/1",
    "llama-3.1-8b-h100": "meta-llama/Meta-Llama-3.1-8B/h100/1",
    "llama-3.1-70b-h100-tp4": "meta-llama/Meta-Llama-3.1-70B/h100/4",
    "llama-3.1-70b-h200-tp8": "meta-llama/Meta-Llama-3.1-70B/h200/8",
}


def made(folder: Path, prefill: str, decode: str) -> Path:
    (folder / "cost").mkdir(exist_ok=True)
    for name, text in (("aic_prefill", prefill), ("aic_decode", decode)):
        (folder / "cost" / f"{name}.csv.gz").write_bytes(gzip.compress(text.encode()))
    return folder


PREFILL = "model,system,backend,tp,new_tokens,prefix_tokens,prefill_ms\n" + "".join(
    f"m,h100_sxm,vllm,2,{n},{c},{n / 10 + c / 100}\n"
    for n in (64, 128)
    for c in (0, 50, 100)
    if (n, c) != (128, 100)
)
DECODE = "model,system,backend,tp,batch,context,step_ms\n" + "".join(
    f"m,h100_sxm,vllm,2,{b},{c},{b + c}\n" for b in (1, 2) for c in (5, 10)
)


def test_a_missing_cell_is_extrapolated_and_names_may_be_short(tmp_path: Path) -> None:
    table = load_table("m/h100/2", made(tmp_path, PREFILL, DECODE))
    assert table.name == "m/h100_sxm/2/vllm"
    assert table.prefill_s[1].tolist() == pytest.approx([0.0128, 0.0133, 0.0138])
    assert table.decode_s.tolist() == [[0.006, 0.011], [0.007, 0.012]]


def test_bad_tables_and_names_are_refused(tmp_path: Path) -> None:
    folder = made(tmp_path, PREFILL + "m,h100_sxm,vllm,2,64,x,1\n", DECODE)
    with pytest.raises(ConfigError, match=r"aic_prefill.csv.gz, line 7"):
        load_table("m/h100/2", folder)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ConfigError, match=r"no cost table `m/h100/4`; did you mean `m/h100_sxm/2/vllm`"):
        load_table("m/h100/4", made(other, PREFILL, DECODE))
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    made(damaged, PREFILL, DECODE)
    (damaged / "cost" / "aic_decode.csv.gz").write_bytes(b"plain")
    with pytest.raises(ConfigError, match="cannot read"):
        load_table("m/h100/2", damaged)


def test_the_data_folder_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PRFAAS_DATA", str(tmp_path))
    assert data_folder() == tmp_path
    with pytest.raises(ConfigError, match=r"aic_prefill\.csv\.gz does not exist"):
        load_table("m/h100/2")
    monkeypatch.setenv("PRFAAS_DATA", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"PRFAAS_DATA is .*no folder"):
        data_folder()


@needs_data
@pytest.mark.parametrize("profile", FITTED)
def test_shipped_fits_are_what_the_tables_say(profile: str) -> None:
    fleet = load_fleet("small" if "8b" in profile else "dense")
    groups = [
        w for cluster in fleet.clusters.values() for w in cluster.workers.values() if w.hardware == profile
    ]
    spec = hardware_of(fleet, groups[0])
    assert spec.prefill_scale == 1.3
    spec = msgspec.structs.replace(spec, prefill_scale=1.0)
    shipped = step_times(spec, profile).router_profile()
    table = load_table(FITTED[profile])
    fitted, error = fit_profile(table, spec.chunk_tokens, spec.kv_tokens)
    for field in shipped.__struct_fields__:
        assert getattr(shipped, field) == pytest.approx(getattr(fitted, field), rel=1e-3)
    assert spec.kv_tokens == kv_capacity_tokens(FITTED[profile])
    # What the comment in the file states.
    assert error.prefill_median < 0.07
    assert error.decode_median < 0.03
    assert error.decode_max < 0.14
    # Full chunks, which long prompts consist of, within 12 %.
    times = TableStepTimes(table, spec)
    for cached in (0, 8192, 32_768):
        linear = step_times(spec, profile).chunk_s(spec.chunk_tokens, cached)
        assert linear == pytest.approx(times.chunk_s(spec.chunk_tokens, cached), rel=0.12)


@needs_data
def test_every_table_makes_step_times_that_rise_with_their_arguments() -> None:
    from simulations.fleet import HardwareSpec
    from simulations.hardware.tables import table_names

    names = table_names()
    assert len(names) == 30
    for name in names:
        times = TableStepTimes(load_table(name), HardwareSpec(kv_tokens=1_000_000))
        lengths = [64, 700, 5000, 8192, 30_000, 131_072]
        assert (np.diff([times.prefill_s(n, 0) for n in lengths]) > 0).all()
        assert times.prefill_s(4096, 98_304) > times.prefill_s(4096, 0)
        assert 0 < times.shared_base_s() < times.chunk_s(64, 0) + 1e-9


@needs_data
def test_the_fitting_command_prints_a_profile() -> None:
    text = profile_yaml("meta-llama/Meta-Llama-3.1-8B/l40s/1", 2048)
    assert "kv_tokens: 174857" in text
    assert "prefill_token_s: " in text
