"""From the configuration a user wrote to the one a run uses: ports, service token, folder."""

from __future__ import annotations

import errno
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
        ConfigError: a host is not an address of this machine, or a port is taken.
    """
    with ExitStack() as held:  # all sockets stay open until the last port is chosen, so that none comes twice
        clusters = {
            cluster_name: msgspec.structs.replace(
                cluster,
                workers={
                    name: _with_port(worker, f"clusters.{cluster_name}.workers.{name}", held)
                    for name, worker in cluster.workers.items()
                },
            )
            for cluster_name, cluster in config.clusters.items()
        }
        gateway = _with_port(config.gateway, "gateway", held)
    token = config.auth.service_token or secrets.token_urlsafe(24)
    auth = msgspec.structs.replace(config.auth, service_token=token)
    return msgspec.structs.replace(config, clusters=clusters, gateway=gateway, auth=auth)


def _with_port(endpoint: Endpoint, path: str, held: ExitStack) -> Endpoint:
    host, port = endpoint.host, endpoint.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = held.enter_context(socket.socket(family, kind, protocol))
        if port:  # as the service will: a port that only lingers after its last owner counts as free
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"`{path}.port`: {host}:{port} is taken; stop what listens there (`ss -ltnp`), "
                f"choose another port, or 0 for any that is free"
            ) from error
        raise ConfigError(f"`{path}.host`: cannot listen on {host}: {error.strerror or error}") from error
    return msgspec.structs.replace(endpoint, port=sock.getsockname()[1])


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
