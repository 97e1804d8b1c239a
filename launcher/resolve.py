"""From the configuration a user wrote to the one a run uses: ports, service token, folder."""

from __future__ import annotations

import os
import secrets
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import msgspec

from prfaas.config import Config, GatewayConfig, WorkerConfig
from prfaas.config_load import dump
from prfaas.errors import ConfigError

Endpoint = TypeVar("Endpoint", WorkerConfig, GatewayConfig)


def resolve(config: Config) -> Config:
    """`config` with a free port for every port 0 and a service token where there is none.

    Raises:
        ConfigError: a host is not an address of this machine.
    """
    with ExitStack() as held:  # all sockets stay open until the last port is chosen, so that none comes twice
        clusters = {
            cluster_name: msgspec.structs.replace(
                cluster, workers={name: _with_port(worker, held) for name, worker in cluster.workers.items()}
            )
            for cluster_name, cluster in config.clusters.items()
        }
        gateway = _with_port(config.gateway, held)
    token = config.auth.service_token or secrets.token_urlsafe(24)
    auth = msgspec.structs.replace(config.auth, service_token=token)
    return msgspec.structs.replace(config, clusters=clusters, gateway=gateway, auth=auth)


def _with_port(endpoint: Endpoint, held: ExitStack) -> Endpoint:
    if endpoint.port:
        return endpoint
    return msgspec.structs.replace(endpoint, port=_free_port(endpoint.host, held))


def _free_port(host: str, held: ExitStack) -> int:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        sock = held.enter_context(socket.socket(family, kind, protocol))
        sock.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on host {host}: {error.strerror or error}") from error
    port: int = sock.getsockname()[1]
    return port


def make_run_dir(state_dir: str | os.PathLike[str]) -> Path:
    """A fresh folder for one run, readable by its owner only: `<state_dir>/<time>-<pid>`."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    run_dir = Path(state_dir).absolute() / f"{stamp}-{os.getpid()}"
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    return run_dir


def write_config(config: Config, run_dir: Path) -> Path:
    """Write `config` to `run_dir/config.yaml`, readable by its owner only: it holds the tokens.

    In it `state_dir` is the run's folder: two runs must not share logs or emulated links.
    """
    config = msgspec.structs.replace(config, state_dir=str(run_dir))
    path = run_dir / "config.yaml"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(dump(config))
    return path
