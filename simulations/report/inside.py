"""Charts that look inside one run, over its time: placement, utilisation, queues, caches, predictions."""

from __future__ import annotations

import numpy as np

from simulations.report.chart import Axis, Chart, Mark, Number, Series
from simulations.report.summary import KINDS, Group, run_seconds, utilisation
from simulations.result import SERVED, RunResult
from simulations.workload.trace import Floats

TIME_BINS = 120
_REQUESTS_PER_BIN = 20
_POINTS = 1500
_GROUPS = 7
"""Colours for groups of workers; further groups repeat them dashed."""


def inside_charts(run: RunResult) -> list[Chart]:
    """Charts of one run; those whose quantity was not sampled are left out."""
    groups = list(enumerate(utilisation(run)))  # the number is the colour, the same in every chart
    workers = [(index, group) for index, group in groups if group.kind != "link"]
    links = [(index, group) for index, group in groups if group.kind == "link"]
    charts = [
        _placement(run),
        _latency(run),
        _resource(
            run,
            workers,
            "utilisation",
            key="stages",
            title="Utilisation of workers",
            caption="Mean over each group. Prefill: time computing; decode: time with any sequence running.",
            label="share of time",
            percent=True,
        ),
        _resource(
            run,
            links,
            "utilisation",
            key="links",
            title="Utilisation of links",
            caption="Bytes sent over capacity, by direction.",
            label="share of capacity",
            percent=True,
        ),
        _resource(
            run,
            workers,
            "pages",
            key="pages",
            title="KV memory of workers",
            caption="Pages pinned by running and waiting requests; at 100 % new requests wait for pages.",
            label="share of pages",
            percent=True,
        ),
        _resource(
            run,
            groups,
            "queue",
            key="queues",
            title="Queue depth",
            caption="Summed over each group. A queue that only grows: more load than capacity.",
            label="requests waiting",
        ),
        _caches(run),
        _prediction(run),
    ]
    return [chart for chart in charts if chart is not None]


def group_colour(index: int) -> tuple[str, int]:
    """(colour role, dash) of a group of workers."""
    return f"policy-{index % _GROUPS}", index // _GROUPS


def _bins(run: RunResult) -> tuple[Floats, Floats]:
    """(edges, middles) of equal time bins over the arrivals."""
    arrivals = run.arrival_s[~np.isnan(run.arrival_s)]
    count = max(8, min(TIME_BINS, len(arrivals) // _REQUESTS_PER_BIN))
    begin, end = (float(arrivals.min()), float(arrivals.max())) if len(arrivals) else (0.0, 1.0)
    edges = np.linspace(begin, end if end > begin else begin + 1.0, count + 1)
    return edges, (edges[:-1] + edges[1:]) / 2


def _bin_of(run: RunResult, edges: Floats) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    # What never arrived (NaN) sorts last; it was not placed either, so that no chart counts it.
    return np.clip(np.searchsorted(edges, run.arrival_s, side="right") - 1, 0, len(edges) - 2)


def _time_axis(run: RunResult) -> tuple[Axis, float]:
    """(axis, seconds per unit): hours for long runs, minutes for middling ones."""
    span_s = run_seconds(run)
    for unit, seconds in (("hours", 3600.0), ("minutes", 60.0)):
        if span_s > 3 * seconds:
            return Axis(label=f"time of arrival, {unit}"), seconds
    return Axis(label="time of arrival, seconds"), 1.0


def _placement(run: RunResult) -> Chart:
    edges, middles = _bins(run)
    axis, unit_s = _time_axis(run)
    bins = _bin_of(run, edges)
    counts = np.vstack(
        [np.bincount(bins[run.kind == kind], minlength=len(middles)) for kind in range(len(KINDS))]
    ).astype(float)
    shares = counts / np.maximum(counts.sum(axis=0), 1.0)
    return Chart(
        key="mix",
        title="Placement mix",
        caption="Share of requests by place of prefill, by time of arrival. Warm colour: over the link.",
        kind="area",
        x=axis,
        y=Axis(label="share of requests", percent=True, low=0.0, high=1.0),
        series=[
            Series(name=kind, colour=f"kind-{kind}", x=(middles / unit_s).tolist(), y=shares[index].tolist())
            for index, kind in enumerate(KINDS)
        ],
    )


def _latency(run: RunResult) -> Chart:
    edges, middles = _bins(run)
    axis, unit_s = _time_axis(run)
    bins = _bin_of(run, edges)
    series = []
    for name, quantile, colour, dash in (("median", 0.5, "policy-0", 0), ("P90", 0.9, "policy-1", 0)):
        y: list[Number] = []
        for index in range(len(middles)):
            values = run.ttft_s[(bins == index) & (run.state == SERVED)]
            y.append(float(np.quantile(values, quantile)) if len(values) else None)
        series.append(Series(name=name, colour=colour, dash=dash, x=(middles / unit_s).tolist(), y=y))
    return Chart(
        key="ttft-over-time",
        title="TTFT over time",
        caption="By time of arrival. Peaks show which bursts the fleet could not absorb.",
        kind="curve",
        x=axis,
        y=Axis(label="TTFT, seconds", low=0.0),
        series=series,
    )


def _resource(
    run: RunResult,
    groups: list[tuple[int, Group]],
    quantity: str,
    *,
    key: str,
    title: str,
    caption: str,
    label: str,
    percent: bool = False,
) -> Chart | None:
    axis, unit_s = _time_axis(run)
    series = []
    for index, group in groups:
        values = group.over_time(quantity)
        if values is None:
            continue
        x, y = _thinned(run.times_s / unit_s, values)
        colour, dash = group_colour(index)
        count = f" ({len(group.members)})" if len(group.members) > 1 else ""
        series.append(Series(name=f"{group.name}{count}", colour=colour, dash=dash, x=x, y=y))
    if not series:
        return None
    return Chart(
        key=key,
        title=title,
        caption=caption,
        kind="curve",
        x=Axis(label=axis.label.replace("time of arrival", "time")),
        y=Axis(label=label, percent=percent, low=0.0, high=1.0 if percent else None),
        series=series,
    )


def _thinned(times: Floats, values: Floats) -> tuple[list[float], list[Number]]:
    """At most `TIME_BINS` points: means of equal runs of samples."""
    parts = min(TIME_BINS, len(values))
    x = [float(part.mean()) for part in np.array_split(times, parts)]
    y: list[Number] = [float(part.mean()) for part in np.array_split(values, parts)]
    return x, y


def _caches(run: RunResult) -> Chart:
    edges, middles = _bins(run)
    axis, unit_s = _time_axis(run)
    placed = run.kind >= 0
    bins = _bin_of(run, edges)[placed]
    prompt = np.bincount(bins, weights=run.prompt_tokens[placed], minlength=len(middles))
    series = []
    for index, (name, tokens) in enumerate(
        (
            ("on the decode worker", run.decode_cached_tokens),
            ("where it was computed", run.site_cached_tokens),
        )
    ):
        found = np.bincount(bins, weights=tokens[placed], minlength=len(middles))
        y: list[Number] = [float(f / p) if p else None for f, p in zip(found, prompt, strict=True)]
        colour, dash = group_colour(index)
        series.append(Series(name=name, colour=colour, dash=dash, x=(middles / unit_s).tolist(), y=y))
    return Chart(
        key="caches",
        title="Cache hits",
        caption="Share of prompt tokens found in the cache of the decode worker, and where it was prefilled.",
        kind="curve",
        x=axis,
        y=Axis(label="share of prompt tokens", percent=True, low=0.0, high=1.0),
        series=series,
    )


def _prediction(run: RunResult) -> Chart | None:
    served = np.flatnonzero((run.state == SERVED) & (run.predicted_ttft_s > 0) & (run.ttft_s > 0))
    if not len(served):
        return None
    chosen = served[np.linspace(0, len(served) - 1, min(_POINTS, len(served))).astype(int)]
    series = []
    for index, kind in enumerate(KINDS):
        of_kind = chosen[run.kind[chosen] == index]
        if len(of_kind):
            x, y = run.predicted_ttft_s[of_kind].tolist(), run.ttft_s[of_kind].tolist()
            series.append(Series(name=kind, colour=f"kind-{kind}", x=x, y=y))
    return Chart(
        key="prediction",
        title="TTFT: predicted and actual",
        caption="One point per request (a sample). On the diagonal: as foreseen; above: later than foreseen.",
        kind="point",
        x=Axis(label="predicted when placed, seconds (log scale)", log=True),
        y=Axis(label="actual, seconds (log scale)", log=True),
        series=series,
        marks=[Mark(axis="diagonal")],
    )
