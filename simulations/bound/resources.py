"""The rows of the linear program: what there is per second, and what a request takes of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulations.bound.envelope import Steps
from simulations.bound.needs import Needs
from simulations.bound.places import Places, Way
from simulations.workload.trace import Floats

WORDS = {
    "prefill": "prefill seconds of {}",
    "decode": "decode seconds of {}",
    "slots": "decode slots of {}",
    "pages": "KV pages of {}",
    "page_seconds": "KV page-seconds of {}",
    "sequences": "sequences to decode at once on {}",
    "link": "link {}",
}


@dataclass(frozen=True, slots=True)
class Resource:
    """A row: Σ taken - τ·capacity + (decode steps)·per_step ≤ 0, all per mean request."""

    kind: str
    """A key of `WORDS`."""
    place: str
    """Name of the group of workers, or the link's direction."""
    group: int = -1
    """Index into `Places.groups`; -1 for a link."""
    capacity: float = 0.0
    """Units per second of the whole group or link; 0 where the steps are the capacity."""
    per_step: float = 0.0
    """Units of a decode step of the group (negative: a step brings so many)."""
    sequence_s: float = 0.0
    """`decode` only: seconds per sequence and step."""
    context_s: float = 0.0
    """`decode` only: seconds per token of context and step."""

    @property
    def name(self) -> str:
        return WORDS[self.kind].format(self.place)


def list_resources(
    where: Places, steps: dict[int, Steps], planes: dict[int, list[int]], page: int
) -> list[Resource]:
    """All rows; `planes` says by decode group which planes of its step times take part."""
    found = []
    for group in sorted({way.site for way in where.ways if not way.local}):
        place = where.groups[group]
        found.append(Resource("prefill", place.name, group, capacity=place.count))
    for group in steps:
        place = where.groups[group]
        pages = place.kv_tokens // page
        for base_s, sequence_s, context_s in steps[group].planes[planes[group]].tolist():
            found.append(Resource("decode", place.name, group, place.count, base_s, sequence_s, context_s))
        found.append(Resource("slots", place.name, group, per_step=-place.max_running))
        found.append(Resource("pages", place.name, group, per_step=-pages))
        found.append(Resource("page_seconds", place.name, group, capacity=place.count * pages))
        found.append(Resource("sequences", place.name, group, per_step=1.0))
    directions = sorted({way.link for way in where.ways if way.link})
    found += [Resource("link", name, capacity=where.link_bytes_per_s[name]) for name in directions]
    return found


def taken(
    resource: Resource, way: Way, needs: Needs, where: Places, steps: dict[int, Steps]
) -> Floats | None:
    """Units of `resource` that each request takes when it goes this way; None = nothing.

    Infinite where a prompt does not fit the way.
    """
    kind = resource.kind
    if kind == "link":
        return needs.kv_bytes if way.link == resource.place else None
    if kind == "prefill":
        return needs.prefill_s[way.site] if way.site == resource.group else None
    if way.decode != resource.group:
        return None
    if kind == "decode":
        decode_s: Floats = needs.steps * resource.sequence_s + needs.context_steps * resource.context_s
        return decode_s + needs.local_s[way.site] if way.local else decode_s
    if kind == "page_seconds":
        wait_s = needs.prefill_s[way.site]
        if way.link:
            wait_s = np.maximum(wait_s, needs.kv_bytes / where.link_bytes_per_s[way.link])
        held: Floats = needs.pages * wait_s + needs.page_steps * steps[way.decode].least_s
        return held
    return {"slots": needs.steps, "pages": needs.page_steps, "sequences": -needs.steps}[kind]
