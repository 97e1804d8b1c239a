from __future__ import annotations

import io
import json
import logging
import os
import socket
import stat
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.logs import JsonFormatter
from launcher.resolve import make_run_dir, resolve, write_config
from launcher.service import child_environment, describe_status, service_specs
from launcher.supervisor import Backoff
from prfaas.config import ClusterConfig, Config, GatewayConfig, ModelConfig, WorkerConfig
from prfaas.config_load import load
from prfaas.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


def fleet(**gateway: object) -> Config:
    workers = {"decode-0": WorkerConfig(role="decode"), "prefill-0": WorkerConfig(role="prefill")}
    return Config(
        model=ModelConfig(path="m"),
        clusters={"pd": ClusterConfig(kind="pd", workers=workers)},
        gateway=msgspec.convert({"port": 0, **gateway}, GatewayConfig),
    )


def ports(config: Config) -> list[int]:
    chosen = [worker.port for cluster in config.clusters.values() for worker in cluster.workers.values()]
    return [config.gateway.port, *chosen]


def test_resolving_chooses_distinct_free_ports_and_makes_a_token() -> None:
    resolved = resolve(fleet())
    chosen = ports(resolved)
    assert len(set(chosen)) == 3
    for port in chosen:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
    assert len(resolved.auth.service_token) >= 24
    assert resolve(fleet()).auth.service_token != resolved.auth.service_token


def test_resolving_twice_changes_nothing() -> None:
    resolved = resolve(fleet())
    assert resolve(resolved) == resolved


def test_a_host_of_another_machine_is_refused_with_its_name() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        resolve(fleet(host="192.0.2.1"))


def test_the_written_configuration_is_private_and_equal(tmp_path: Path) -> None:
    resolved = resolve(fleet())
    run_dir = make_run_dir(tmp_path / "runs")
    path = write_config(resolved, run_dir)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert load(path, {}) == msgspec.structs.replace(resolved, state_dir=str(run_dir))


def test_children_do_not_apply_environment_twins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRFAAS_GATEWAY__PORT", "0")
    monkeypatch.setenv("PRFAAS_STATE_DIR", "x")
    monkeypatch.setenv("PRFAAS_CACHE", "kept")
    environment = child_environment()
    assert "PRFAAS_GATEWAY__PORT" not in environment
    assert "PRFAAS_STATE_DIR" not in environment
    assert environment["PRFAAS_CACHE"] == "kept"
    assert environment["PATH"] == os.environ["PATH"]


def test_every_service_has_a_command_a_url_and_a_log(tmp_path: Path) -> None:
    config = resolve(fleet())
    workers, gateway = service_specs(config, tmp_path / "c.yaml", tmp_path, ("--log-format", "json"))
    assert [spec.name for spec in workers] == ["decode-0", "prefill-0"]
    assert workers[1].command[0] == sys.executable
    assert workers[1].command[-6:] == (
        "--name", "prefill-0", "--config", str(tmp_path / "c.yaml"), "--log-format", "json",
    )  # fmt: skip
    assert gateway.url == f"http://127.0.0.1:{config.gateway.port}"
    assert len({spec.log_path for spec in [*workers, gateway]}) == 3


@given(st.integers(1, 5000))
def test_backoff_never_shrinks_and_is_bounded(failures: int) -> None:
    backoff = Backoff(first_s=0.5, longest_s=30.0)
    assert 0.5 <= backoff.delay_s(failures) <= backoff.delay_s(failures + 1) <= 30.0


def test_a_status_is_described_in_words() -> None:
    assert describe_status(3) == "exit status 3"
    assert describe_status(-9) == "signal SIGKILL"


def test_a_json_log_line_carries_message_and_error() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.Logger("some.module")
    logger.addHandler(handler)
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("event=%s", "failed")
    fields = json.loads(stream.getvalue())
    assert fields["logger"] == "some.module"
    assert fields["level"] == "error"
    assert fields["message"] == "event=failed"
    assert "ValueError: broken" in fields["error"]
