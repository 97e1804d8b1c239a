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


def test_a_single_service_needs_fixed_ports(tmp_path: Path, model_folder: Path) -> None:
    config = write_config(tmp_path, model_folder)
    assert_one_sentence(prfaas("worker", "-c", config, "--name", "d"), "fixed ports")


@pytest.mark.parametrize(("flag", "value"), [("--link", "200"), ("--rtt", "forty"), ("--requests", "0")])
def test_a_flag_of_the_wrong_form_is_named(flag: str, value: str) -> None:
    assert_one_sentence(prfaas("demo", flag, value), flag)


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
