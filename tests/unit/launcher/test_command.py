from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from launcher import doctor
from launcher.cli import main
from launcher.doctor import Check
from launcher.policy_check import check_policy
from prfaas.config import PolicyConfig
from prfaas.config_load import loads
from prfaas.errors import ConfigError

CONFIG = """
model: {{path: {model}}}
clusters:
  pd:
    kind: pd
    workers:
      d: {{role: decode, port: {port}}}
"""


def prfaas(*arguments: str) -> Result:
    clean = {name: "" for name in os.environ if name.startswith("PRFAAS_")}
    return CliRunner().invoke(main, arguments, env=dict.fromkeys(clean))


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


def write_config(tmp_path: Path, model: Path, port: int = 0) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(CONFIG.format(model=model, port=port))
    return str(path)


def assert_one_sentence(result: Result, *parts: str) -> None:
    assert result.exit_code == 2
    lines = result.stderr.strip().splitlines()
    assert "Traceback" not in result.stderr
    assert all(part in lines[-1] for part in parts), lines


@pytest.mark.parametrize("command", [("up",), ("router",), ("worker", "--name", "d")])
def test_a_missing_configuration_ends_in_one_sentence(command: tuple[str, ...], tmp_path: Path) -> None:
    assert_one_sentence(prfaas(*command, "-c", str(tmp_path / "absent.yaml")), "absent.yaml", "No such file")


def test_a_missing_model_says_how_to_get_one(tmp_path: Path) -> None:
    config = write_config(tmp_path, tmp_path / "no-model")
    assert_one_sentence(prfaas("up", "-c", config), "no-model", "prfaas model")


def test_an_unknown_worker_is_refused_with_the_known_names(tmp_path: Path, model_folder: Path) -> None:
    config = write_config(tmp_path, model_folder, port=8101)
    assert_one_sentence(prfaas("worker", "-c", config, "--name", "e"), "--name e", "known: d")


def test_a_policy_that_cannot_be_used_is_refused_before_anything_starts(
    tmp_path: Path, model_folder: Path
) -> None:
    config = write_config(tmp_path, model_folder)
    with Path(config).open("a") as file:
        file.write("policy: {name: cost_modle}\n")
    assert_one_sentence(prfaas("up", "-c", config), "policy.name", "did you mean `cost_model`")


def test_a_taken_port_is_refused_before_anything_starts(tmp_path: Path, model_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = write_config(tmp_path, model_folder, port=server.getsockname()[1])
        assert_one_sentence(prfaas("up", "-c", config), "`clusters.pd.workers.d.port`", "is taken")


def test_a_single_service_needs_fixed_ports(tmp_path: Path, model_folder: Path) -> None:
    config = write_config(tmp_path, model_folder)
    assert_one_sentence(prfaas("worker", "-c", config, "--name", "d"), "fixed ports")


@pytest.mark.parametrize(("flag", "value"), [("--link", "200"), ("--rtt", "forty"), ("--requests", "0")])
def test_a_flag_of_the_wrong_form_is_named(flag: str, value: str) -> None:
    assert_one_sentence(prfaas("demo", flag, value), flag)


@pytest.mark.parametrize(("flag", "value"), [("--model-dir", "absent"), ("--json", "absent/figures.json")])
def test_the_demo_refuses_paths_that_it_could_not_use_later(flag: str, value: str, tmp_path: Path) -> None:
    assert_one_sentence(prfaas("demo", flag, str(tmp_path / value)), flag, "absent")


def test_every_flag_shows_its_environment_twin() -> None:
    for command in main.commands.values():
        for parameter in command.params:
            assert parameter.envvar or parameter.name == "help", (command.name, parameter.name)


def test_the_version_is_the_packages() -> None:
    result = prfaas("--version")
    assert result.exit_code == 0
    assert result.output.startswith("prfaas, version ")


# ---------------------------------------------------------------- doctor


def test_a_taken_port_fails_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = doctor.check_port("gateway", "127.0.0.1", port)
    assert taken.status == "fail"
    assert "choose another port" in taken.mend
    assert doctor.check_port("gateway", "127.0.0.1", port).status == "ok"


def test_a_port_of_another_machine_is_not_checked() -> None:
    assert doctor.check_port("remote", "192.0.2.1", 8101).status == "ok"


def test_a_model_folder_without_weights_fails_naming_them(model_folder: Path) -> None:
    (model_folder / "model.safetensors").unlink()
    check = doctor.check_model(model_folder)
    assert check.status == "fail"
    assert "*.safetensors" in check.found


def test_a_model_that_the_engine_cannot_compute_fails_and_one_without_template_is_a_warning(
    tiny_model_path: Path, model_folder: Path
) -> None:
    assert doctor.check_model(tiny_model_path).status == "ok"
    (model_folder / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    unsupported = doctor.check_model(model_folder)
    assert unsupported.status == "fail"
    assert "MambaForCausalLM" in unsupported.found
    (model_folder / "config.json").write_text((tiny_model_path / "config.json").read_text())
    without_template = doctor.check_model(model_folder)
    assert without_template.status == "warn"
    assert "/v1/completions" in without_template.mend


def test_a_ucx_device_that_does_not_exist_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo,warp9")
    check = doctor.check_devices()
    assert check.status == "fail"
    assert "warp9" in check.mend
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    assert doctor.check_devices().status == "ok"


def test_a_probe_that_crashes_fails_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", "raise SystemExit('libucp.so is missing')"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    monkeypatch.setattr(doctor, "_run_probe", crash)
    (check,) = doctor.check_nixl()
    assert check.status == "fail"
    assert check.found == "libucp.so is missing"
    assert check.mend


def test_doctor_as_json_fails_when_a_check_fails(
    tmp_path: Path, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "check_nixl", lambda: [Check("nixl", "fail", "absent", "install it")])
    result = prfaas("doctor", "--json", "-c", write_config(tmp_path, tiny_model_path))
    assert result.exit_code == 1
    report = json.loads(result.output)
    assert report["ok"] is False
    by_name = {check["name"]: check for check in report["checks"]}
    assert by_name["nixl"]["mend"] == "install it"
    assert by_name["model"]["status"] == "ok"
    assert by_name["configuration"]["found"] == "1 clusters, 1 workers"


def test_doctor_counts_memory_of_this_machines_workers_only() -> None:
    worker = "{{role: prefill, host: {host}, port: 8101, memory: {memory}}}"
    config = loads(
        CONFIG.format(model="m", port=0)
        + f"      here: {worker.format(host='127.0.0.1', memory='1MiB')}\n"
        + f"      elsewhere: {worker.format(host='192.0.2.1', memory='900TiB')}\n",
        {},
    )
    local = doctor.local_workers(config)
    assert len(local) == 2
    assert doctor.check_memory(local).status == "ok"
    assert doctor.check_memory([config.worker("elsewhere")[1]]).status == "fail"
    assert "none of the workers" in doctor.check_memory([]).found


def test_doctor_shows_what_to_do_below_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [Check("memory", "ok", "plenty"), Check("nixl", "fail", "absent", "install it")]
    monkeypatch.setattr(doctor, "all_checks", lambda _: iter(checks))
    result = prfaas("doctor")
    assert result.exit_code == 1
    lines = [line.split() for line in result.output.splitlines()]
    assert lines[:2] == [["ok", "memory", "plenty"], ["fail", "nixl", "absent"]]
    assert lines[2] == ["→", "install", "it"]
    assert "1 of 2 checks failed" in result.output


# ---------------------------------------------------------------- policy


POLICY = """
from policies.base import BasePolicy


class First(BasePolicy):
    def choose(self, request, candidates, view, rng):
        return 0
"""


def test_a_policy_is_found_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "policy_of_mine.py").write_text(POLICY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert type(check_policy(PolicyConfig(name="policy_of_mine:First"))).__name__ == "First"
    assert sys.path[-1] == str(tmp_path)  # last: no file there hides an installed package
    sys.modules.pop("policy_of_mine")


def test_whatever_a_policys_code_raises_is_told_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "policy_with_slip.py").write_text("def choose(:")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ConfigError, match=r"`policy_with_slip:A` cannot be used.*SyntaxError"):
        check_policy(PolicyConfig(name="policy_with_slip:A"))


def test_every_failing_check_says_how_to_mend_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "_run_probe", lambda: subprocess.run(["false"], capture_output=True, text=True, check=False)
    )
    config = tmp_path / "broken.yaml"
    config.write_text("model: 3\nclusters: {}\n")
    failed = [check for check in doctor.all_checks(config) if check.status == "fail"]
    assert {check.name for check in failed} >= {"configuration", "nixl"}
    assert all(check.mend for check in failed)


@pytest.mark.process
def test_the_probe_moves_bytes_between_two_real_agents() -> None:
    checks = {check.name: check for check in doctor.check_nixl()}
    assert checks["nixl"].status == "ok"
    assert checks["ucx"].status == "ok"
