"""A fleet as the fluid bound sees it: groups of equal workers, links, and the ways a request can take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from prfaas.errors import ConfigError
from simulations.fleet import Fleet
from simulations.fleet_load import scheduled_capacity
from simulations.hardware.profiles import hardware_of, step_times
from simulations.hardware.step_times import StepTimes


@dataclass(frozen=True, slots=True)
class Place:
    """A group of equal workers in one role."""

    name: str
    """`cluster/group`."""
    cluster: str
    role: str
    """`prefill` or `decode`: what the group may do here."""
    count: int
    times: StepTimes
    kv_tokens: int
    max_running: int


@dataclass(frozen=True, slots=True)
class Way:
    """Decode at `decode`, prefill at `site`; both index `Places.groups`."""

    decode: int
    site: int
    """Equal to `decode` for local prefill."""
    link: str
    """Direction `source->target` that the KV crosses, empty inside a cluster."""

    @property
    def local(self) -> bool:
        return self.decode == self.site


@dataclass(frozen=True, slots=True)
class Places:
    groups: tuple[Place, ...]
    ways: tuple[Way, ...]
    link_bytes_per_s: dict[str, float]
    """By direction: the most that the link ever has, over the fleet's schedule."""
    twins: tuple[tuple[int, int], ...]
    """(decode, prefill) entries that are one set of workers in two roles: what one has the other lacks."""


def places(fleet: Fleet, free_roles: bool = False) -> Places:
    """What `fleet` offers.

    Args:
        free_roles: workers of PD clusters may be prefill or decode workers as the policy likes, at any time.
            What a policy that converts workers can reach is bounded by this only.

    Raises:
        ConfigError: nothing in the fleet decodes, or a profile is unknown.
    """
    groups: list[Place] = []
    twins = []
    for cluster_name, cluster in fleet.clusters.items():
        for group_name, group in cluster.workers.items():
            hardware = hardware_of(fleet, group)
            place = Place(
                name=f"{cluster_name}/{group_name}",
                cluster=cluster_name,
                role=group.role,
                count=group.count,
                times=step_times(hardware, group.hardware),
                kv_tokens=hardware.kv_tokens,
                max_running=group.max_running,
            )
            if free_roles and cluster.kind == "pd":
                twins.append((len(groups), len(groups) + 1))
                groups += [replace(place, role="decode"), replace(place, role="prefill")]
            else:
                groups.append(place)
    groups_with_work = [index for index, place in enumerate(groups) if place.count > 0]
    decoders = [index for index in groups_with_work if groups[index].role == "decode"]
    if not decoders:
        raise ConfigError(f"fleet {fleet.name}: there is no decode worker, so nothing can be served")
    links = _links(fleet)
    ways = []
    for decode in decoders:
        ways.append(Way(decode, decode, ""))
        for site in groups_with_work:
            if groups[site].role != "prefill":
                continue
            direction = f"{groups[site].cluster}->{groups[decode].cluster}"
            same = groups[site].cluster == groups[decode].cluster
            if same or links.get(direction, 0.0) > 0:
                ways.append(Way(decode, site, "" if same else direction))
    return Places(tuple(groups), tuple(ways), links, tuple(twins))


def _links(fleet: Fleet) -> dict[str, float]:
    found = {}
    for name, link in fleet.links.items():
        changes = [scheduled_capacity(change) for change in fleet.schedule if change.link == name]
        capacity = max([float(link.capacity), *changes])
        first, second = link.between
        found[f"{first}->{second}"] = found[f"{second}->{first}"] = capacity
    return found
