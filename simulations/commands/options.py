"""Options that commands share, and what they mean: a trace at a rate, a fleet, its links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from prfaas.errors import ConfigError
from prfaas.units import Rate
from simulations.console import note
from simulations.fleet import Fleet
from simulations.fleet_load import check_fits, load_fleet
from simulations.workload.builder import MAX_SECONDS
from simulations.workload.detect import FORMATS
from simulations.workload.load import load_trace
from simulations.workload.trace import Trace

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--trace",
        "trace_spec",
        required=True,
        metavar="FILE",
        help="FILE, FILE?option=value&…, generate:FAMILY?option=value (docs/simulation-formats.md).",
    ),
    click.option(
        "--format",
        "trace_format",
        type=click.Choice(list(FORMATS)),
        help="Of the trace [default: by content].",
    ),
    click.option(
        "--fleet",
        "fleet_name",
        required=True,
        metavar="NAME|FILE",
        help="A fleet file, or a shipped one by name: hybrid, dense, small.",
    ),
    click.option(
        "--rate-scale", type=float, help="Let the requests arrive this many times as fast as recorded."
    ),
    click.option("--rate", "rate_rps", type=float, help="Scale arrivals to this many requests per second."),
    click.option("--seed", type=int, default=0, show_default=True, help="Of every random choice."),
    click.option("--causal", is_flag=True, help="Turns of a conversation wait for the answer before them."),
    click.option(
        "--requests", "--first", "requests", type=click.IntRange(min=1), help="Only the first N requests."
    ),
    click.option(
        "--warm-up",
        type=click.FloatRange(0.0, 0.95),
        default=0.0,
        help="Share of the requests, by arrival, that only fill the caches and are not counted.",
    ),
    click.option(
        "--link",
        "links",
        multiple=True,
        metavar="[NAME=]RATE",
        help="Override the capacity of one link, or of all, e.g. 10Gbit or wan=10Gbit.",
    ),
)


def inputs(command: Command) -> Command:
    """Adds the options of a trace and a fleet; the command gets them as one argument `given`."""

    def wrapped(**values: Any) -> Any:
        given = Given(**{name: values.pop(name) for name in Given.__slots__})
        return command(given=given, **values)

    wrapped.__doc__, wrapped.__name__ = command.__doc__, command.__name__
    wrapped.__click_params__ = list(getattr(command, "__click_params__", []))  # type: ignore[attr-defined]
    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Given:
    """The shared options as given."""

    trace_spec: str
    trace_format: str | None
    fleet_name: str
    rate_scale: float | None
    rate_rps: float | None
    seed: int
    causal: bool
    requests: int | None
    warm_up: float
    links: tuple[str, ...]

    def load(self) -> tuple[Trace, Fleet]:
        """The trace at its rate, and the fleet with its links.

        Raises:
            ConfigError: what is wrong, with file, line and field.
        """
        fleet = with_links(load_fleet(self.fleet_name), self.links)
        trace = load_trace(self.trace_spec, self.trace_format, seed=self.seed)
        if self.requests is not None:
            trace = trace.part(0, min(self.requests, len(trace)))
        for line in trace.notes:
            note(f"{trace.name}: {line}")
        check_fits(fleet, trace)
        return at_rate(trace, self.rate_scale, self.rate_rps), fleet


def at_rate(trace: Trace, scale: float | None, rate_rps: float | None) -> Trace:
    """`trace` with its arrivals `scale` times as fast, or at a mean of `rate_rps`.

    Raises:
        ConfigError: both are given, one is not above 0, the trace has no rate to scale or would take years.
    """
    if scale is not None and rate_rps is not None:
        raise ConfigError("--rate and --rate-scale both set the rate of arrival; give one")
    for name, value in (("--rate-scale", scale), ("--rate", rate_rps)):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{name} must be above 0, got {value:g}")
    if rate_rps is not None:
        if trace.duration_s <= 0:
            raise ConfigError(
                f"--rate: all requests of {trace.name} arrive at once, so there is no rate to scale"
            )
        scale = rate_rps / trace.rate_per_s
    if scale is not None and trace.duration_s / scale > MAX_SECONDS:
        raise ConfigError(
            f"at that rate {trace.name} takes years; which did you mean, --rate or --rate-scale?"
        )
    return trace if scale is None else trace.at_rate(scale)


def with_links(fleet: Fleet, overrides: tuple[str, ...]) -> Fleet:
    """`fleet` with the capacities that `[NAME=]RATE` give.

    Raises:
        ConfigError: no such link, or no rate.
    """
    for override in overrides:
        name, equals, rate = override.rpartition("=")
        try:
            capacity = Rate.parse(rate)
        except ValueError as error:
            raise ConfigError(f"--link: {error}") from error
        if capacity <= 0:
            raise ConfigError(
                f"--link: `{override}` must be above 0; an outage goes into the fleet's schedule"
            )
        if not fleet.links:
            raise ConfigError(f"--link: fleet {fleet.name} has no links")
        if equals and name not in fleet.links:
            known = ", ".join(fleet.links)
            raise ConfigError(f"--link: fleet {fleet.name} has no link `{name}` (it has: {known})")
        links = {
            key: msgspec.structs.replace(link, capacity=capacity) if key == name or not equals else link
            for key, link in fleet.links.items()
        }
        fleet = msgspec.structs.replace(fleet, links=links)
    return fleet


def check_parent(option: str, path: Path | None) -> None:
    """Before the work: is there a folder for this file?

    Raises:
        ConfigError: there is none, or the path is a folder.
    """
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{option}: there is no folder {path.absolute().parent}; make it first")
    if path.is_dir():
        raise ConfigError(f"{option}: {path} is a folder; name a file")
