"""Planes under a worker's decode step times: the linear program's way to know a table that is not linear."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from simulations.hardware.step_times import StepTimes
from simulations.workload.trace import Floats

MAX_KNOTS = 10_000
STEEP = 1e-4
"""Faces of the hull whose normal is closer to level than this are left out."""


@dataclass(frozen=True, slots=True)
class Steps:
    """What is known of a decode group's steps."""

    planes: Floats
    """Rows (per step, per sequence, per context token) in seconds; every step takes at least each of them."""
    least_s: float
    """No step is shorter."""

    @classmethod
    def of(cls, times: StepTimes, max_running: int, context_length: int) -> Steps:
        points = step_points(times, max_running, context_length)
        return cls(lower_planes(points), float(points[:, 2].min()))

    def highest(self, load: Floats) -> int:
        """Index of the plane that asks most for `load` = (steps, sequence steps, context steps)."""
        return int(np.argmax(self.planes @ load))


def step_points(times: StepTimes, max_running: int, context_length: int) -> Floats:
    """(batch, total context, seconds) of every batch up to `max_running`, at every knot of its lines.

    Between two knots of one batch a step is linear in the context, so whatever is below all these points is
    below every step that the worker can take.
    """
    points = []
    for batch in range(1, max_running + 1):
        context, most = 0.0, float(batch * context_length)
        for _ in range(MAX_KNOTS):
            line = times.decode_line(batch, context)
            end = min(line.until_context, most)
            points.append((batch, context, line.base_s + line.slope_s * context))
            points.append((batch, end, line.base_s + line.slope_s * end))
            if end >= most:
                break
            context = end if end > context else np.nextafter(end, most)
    return np.array(points)


def lower_planes(points: Floats) -> Floats:
    """Rows (per step, per sequence, per context token) of the lower convex hull of `step_points`, in seconds.

    Every row is at or under every point: step_s >= row · (1, batch, context). Their maximum is the largest
    convex function under the points.
    """
    scale = np.maximum(points.max(axis=0), 1e-12)
    scaled = points / scale
    design = np.column_stack([np.ones(len(scaled)), scaled[:, :2]])
    flat = np.linalg.lstsq(design, scaled[:, 2], rcond=None)[0]
    if np.abs(design @ flat - scaled[:, 2]).max() < 1e-9 or np.ptp(scaled[:, 0]) == 0:
        found = flat[None, :] if np.ptp(scaled[:, 0]) else _planes_of_one_batch(scaled)
    else:
        from scipy.spatial import ConvexHull

        equations = ConvexHull(scaled, qhull_options="QJ").equations
        lower = equations[equations[:, 2] < -STEEP]  # walls say nothing, and say it inexactly
        found = np.vstack([-lower[:, [3, 0, 1]] / lower[:, 2:3], [scaled[:, 2].min(), 0.0, 0.0]])
    found = np.unique(np.round(found, 12), axis=0)
    above = (design @ found.T - scaled[:, 2:3]).max(axis=0)
    found[:, 0] -= np.maximum(above, 0.0)  # rounding must not lift a plane over a point
    planes: Floats = found * scale[2] / np.array([1.0, scale[0], scale[1]])
    return planes


def _planes_of_one_batch(scaled: Floats) -> Floats:
    """Worker that runs one sequence at a time: the lower hull of seconds over context."""
    order = np.lexsort((scaled[:, 2], scaled[:, 1]))
    hull: list[tuple[float, float]] = []
    for x, y in scaled[order][:, 1:]:
        if hull and x == hull[-1][0]:
            continue
        while len(hull) > 1 and _turns_up(hull[-2], hull[-1], (x, y)):
            hull.pop()
        hull.append((float(x), float(y)))
    if len(hull) == 1:
        return np.array([[hull[0][1], 0.0, 0.0]])
    rows = []
    for (x0, y0), (x1, y1) in pairwise(hull):
        slope = (y1 - y0) / (x1 - x0)
        rows.append([y0 - slope * x0, 0.0, slope])
    return np.array(rows)


def _turns_up(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Whether b lies on or over the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])
