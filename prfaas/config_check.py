"""What a well-typed configuration must also satisfy before anything starts."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterator, Mapping

from prfaas.config import Config, LinkConfig, PacedConfig, WorkerConfig
from prfaas.errors import ConfigError
from prfaas.protocol.messages import MAX_DEADLINE_S

_MAX_PORT = 65535


def check(config: Config) -> None:
    """Refuse a configuration whose parts contradict each other.

    Raises:
        ConfigError: naming the first field at fault and what to do.
    """
    _check_clusters(config)
    for path, worker in _workers(config):
        _check_worker(path, worker)
    _check_alike(config)
    check_links({name: cluster.kind for name, cluster in config.clusters.items()}, config.links)
    _check_gateway(config)
    _check_policy_and_tokens(config)
    _check_timeouts(config)
    _check_ports(config)


def check_standalone(config: Config) -> None:
    """What services that are started one by one need too: fixed ports, and a shared secret off loopback.

    Raises:
        ConfigError: a port is 0, or a service listens on the network without `auth.service_token`.
    """
    for path, host, port in _endpoints(config):
        if port == 0:
            raise ConfigError(f"`{path}.port` is 0; services started one by one need fixed ports")
        if not config.auth.service_token and not _is_loopback(host):
            raise ConfigError(
                f"`auth.service_token` is empty while `{path}` listens on {host}; set a secret of your own"
            )


def _check_clusters(config: Config) -> None:
    if not any(cluster.kind == "pd" for cluster in config.clusters.values()):
        raise ConfigError("`clusters` has no cluster of kind pd; the gateway and decode workers need one")
    owner: dict[str, str] = {}
    for name, cluster in config.clusters.items():
        check_roles(name, cluster.kind, {worker: spec.role for worker, spec in cluster.workers.items()})
        for worker in cluster.workers:
            if worker in owner:
                raise ConfigError(
                    f"worker {worker} is in clusters {owner[worker]} and {name}; names must be unique"
                )
            owner[worker] = name


def check_roles(name: str, kind: str, roles: Mapping[str, str]) -> None:
    """Refuse a cluster of `kind` whose workers' roles (by worker) do not fit it.

    Raises:
        ConfigError: naming the worker.
    """
    if not roles:
        raise ConfigError(f"`clusters.{name}.workers` is empty")
    decoding = [worker_name for worker_name, role in roles.items() if role == "decode"]
    if kind == "prefill" and decoding:
        raise ConfigError(
            f"`clusters.{name}.workers.{decoding[0]}.role` is decode, but cluster {name} is of kind prefill; "
            f"decode workers belong into a pd cluster"
        )
    if kind == "pd" and not decoding:
        raise ConfigError(f"`clusters.{name}` is of kind pd and has no decode worker")


def _check_worker(path: str, worker: WorkerConfig) -> None:
    for field in ("page_size", "memory", "threads", "chunk_tokens", "max_running", "max_queue"):
        value = getattr(worker, field)
        if value < 1:
            raise ConfigError(f"`{path}.{field}` must be at least 1, got {value}")
    if not 0.0 < worker.cpu_share <= 1.0:
        raise ConfigError(f"`{path}.cpu_share` must be above 0 and at most 1, got {worker.cpu_share}")
    if any(cpu < 0 for cpu in worker.cpus) or len(set(worker.cpus)) != len(worker.cpus):
        raise ConfigError(f"`{path}.cpus` must be distinct core numbers, got {worker.cpus}")
    if worker.engine == "paced":
        _check_paced(f"{path}.paced", worker.paced)


def _check_paced(path: str, paced: PacedConfig) -> None:
    for field in paced.__struct_fields__:
        if not 0 <= getattr(paced, field) < math.inf:
            raise ConfigError(f"`{path}.{field}` must be 0 or more, and finite")
    if not paced.time_scale:
        raise ConfigError(f"`{path}.time_scale` must be above 0")
    if not (paced.prefill_base or paced.prefill_token) or not (paced.decode_base or paced.decode_sequence):
        raise ConfigError(
            f"`{path}` gives no step times; set prefill_base or prefill_token, and decode_base or "
            f"decode_sequence, in seconds"
        )


def _check_alike(config: Config) -> None:
    """Workers exchange pages, so they must agree on what a page is."""
    workers = list(_workers(config))
    first_path, first = workers[0]
    for path, worker in workers[1:]:
        for field in ("page_size", "dtype"):
            ours, theirs = getattr(worker, field), getattr(first, field)
            if ours != theirs:
                raise ConfigError(
                    f"`{path}.{field}` is {ours}, but `{first_path}.{field}` is {theirs}; all must match"
                )


def check_links(kinds: Mapping[str, str], links: Mapping[str, LinkConfig]) -> None:
    """Refuse links that join no two clusters, or no link between a pd and a prefill cluster.

    Args:
        kinds: kind by cluster.

    Raises:
        ConfigError: naming the link and its field.
    """
    taken: dict[frozenset[str], str] = {}
    for name, link in links.items():
        pair = frozenset(link.between)
        for cluster in link.between:
            if cluster not in kinds:
                known = ", ".join(kinds)
                raise ConfigError(
                    f"`links.{name}.between` names {cluster}, which is no cluster (known: {known})"
                )
        if len(pair) != 2:
            raise ConfigError(f"`links.{name}.between` joins {link.between[0]} to itself")
        if pair in taken:
            raise ConfigError(f"`links.{name}` joins the same clusters as `links.{taken[pair]}`; keep one")
        if not 0 < link.capacity < math.inf:
            raise ConfigError(f"`links.{name}.capacity` must be above 0, and finite")
        if not 0 <= link.rtt < math.inf:
            raise ConfigError(f"`links.{name}.rtt` must be 0 or more, and finite")
        taken[pair] = name
    for pd in (name for name, kind in kinds.items() if kind == "pd"):
        for other in (name for name, kind in kinds.items() if kind == "prefill"):
            if frozenset((pd, other)) not in taken:
                raise ConfigError(f"no link joins clusters {pd} and {other}; add one under `links`")


def _check_gateway(config: Config) -> None:
    gateway = config.gateway
    if gateway.cluster and gateway.cluster not in config.clusters:
        known = ", ".join(config.clusters)
        raise ConfigError(f"`gateway.cluster` is {gateway.cluster}, which is no cluster (known: {known})")
    if gateway.cluster and config.clusters[gateway.cluster].kind != "pd":
        raise ConfigError(f"`gateway.cluster` is {gateway.cluster}, which is not of kind pd")
    for field in ("max_body", "max_inflight", "default_max_tokens", "max_attempts"):
        value = getattr(gateway, field)
        if value < 1:
            raise ConfigError(f"`gateway.{field}` must be at least 1, got {value}")
    if gateway.seed < 0:
        raise ConfigError(f"`gateway.seed` must be 0 or more, got {gateway.seed}")


def _check_policy_and_tokens(config: Config) -> None:
    if not config.policy.time_budget > 0:
        raise ConfigError("`policy.time_budget` must be above 0")
    if not all(config.auth.client_tokens):
        raise ConfigError("`auth.client_tokens` has an empty token; leave the list empty to let everybody in")


def _check_timeouts(config: Config) -> None:
    timeouts = config.timeouts
    for field in timeouts.__struct_fields__:
        if not 0 < getattr(timeouts, field) <= MAX_DEADLINE_S:
            raise ConfigError(f"`timeouts.{field}` must be above 0 and at most 24 hours")
    for field in ("silence", "lease"):
        if getattr(timeouts, field) < 2 * timeouts.heartbeat:
            raise ConfigError(
                f"`timeouts.{field}` must be at least twice `timeouts.heartbeat`: one late beat must not kill"
            )


def _check_ports(config: Config) -> None:
    taken: dict[tuple[str, int], str] = {}
    for path, host, port in _endpoints(config):
        if not 0 <= port <= _MAX_PORT:
            raise ConfigError(f"`{path}.port` must be between 0 and {_MAX_PORT}, got {port}")
        if port and (host, port) in taken:
            raise ConfigError(f"`{path}.port` {port} is also the port of `{taken[host, port]}`")
        taken[host, port] = path


def _workers(config: Config) -> Iterator[tuple[str, WorkerConfig]]:
    for cluster_name, cluster in config.clusters.items():
        for name, worker in cluster.workers.items():
            yield f"clusters.{cluster_name}.workers.{name}", worker


def _endpoints(config: Config) -> Iterator[tuple[str, str, int]]:
    """(path, host, port) of everything that listens."""
    yield "gateway", config.gateway.host, config.gateway.port
    for path, worker in _workers(config):
        yield path, worker.host, worker.port


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
