"""Fit what the tables lack on one half of the points, and measure the error on the other."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from prfaas.errors import ConfigError
from simulations.fleet import HardwareSpec
from simulations.hardware.table_times import TableStepTimes
from simulations.hardware.tables import kv_capacity_tokens, load_table
from simulations.validate.closed_loop import CHUNK_TOKENS, Bare, Overheads, bare, predict
from simulations.validate.points import Group, Point, read_points

SMALLEST_GROUP = 10
"""Points that a group needs before it gets overheads of its own."""
_START = Overheads(1.3, 1.2, 1e-3, 0.02, 0.2)
_LOW = Overheads(0.3, 0.3, 0.0, 0.0, 0.0)
_HIGH = Overheads(6.0, 6.0, 0.05, 2.0, 1.0)
_UNLIMITED = 2**40


@dataclass(frozen=True, slots=True)
class Error:
    """Relative errors |predicted ÷ measured - 1| over some points."""

    points: int
    ttft_median: float
    ttft_p90: float
    ttft_bias: float
    """Median of predicted ÷ measured."""
    tpot_median: float
    tpot_p90: float
    tpot_bias: float


@dataclass(frozen=True, slots=True)
class GroupResult:
    """One model on one system under one engine, aggregated or not."""

    model: str
    system: str
    backend: str
    precision: str
    mode: str
    bare: Error
    """The tables as they are, over all points of the group."""
    common: Error
    """Held-out points, with the overheads fitted to all groups together."""
    own: Error | None
    """Held-out points, with the group's own overheads; None = too few points."""
    overheads: Overheads | None
    repeats_ttft: float
    """Largest ÷ smallest measurement of one configuration, median over those measured more than once; NaN
    where none was. No prediction from the configuration can be nearer than half of this."""
    repeats_tpot: float


@dataclass(frozen=True, slots=True)
class Validation:
    seed: int
    skipped: dict[str, int]
    common: Overheads
    bare: Error
    common_error: Error
    own_error: Error
    """Held-out points, each with its group's overheads, or the common ones where it has none."""
    groups: tuple[GroupResult, ...]

    def as_json(self) -> dict[str, object]:
        """Plain data; what is not known is None."""
        plain = _without_nan(asdict(self))
        assert isinstance(plain, dict)
        return plain


def validate(seed: int = 0, folder: str | os.PathLike[str] | None = None) -> Validation:
    """Predict every measured point that has a cost table.

    Raises:
        ConfigError: the data are not there, or scipy is not installed.
    """
    sample = read_points(folder)
    if not sample.points:
        raise ConfigError("no measured point has a cost table; is the data folder complete?")
    cases = _cases(sample.points, folder)
    fitted, held = split(cases, seed)
    common = fit(fitted)
    groups: list[GroupResult] = []
    own_predictions: list[tuple[Bare, Overheads]] = []
    for name in sorted({case.point.group for case in cases}):
        ours, theirs = _of(fitted, name), _of(held, name)
        own = fit(ours) if len(ours) + len(theirs) >= SMALLEST_GROUP and ours and theirs else None
        own_predictions += [(case, own or common) for case in theirs]
        everything = _of(cases, name)
        groups.append(
            GroupResult(
                *name,
                bare=measure([(case, Overheads()) for case in everything]),
                common=measure([(case, common) for case in theirs]),
                own=measure([(case, own) for case in theirs]) if own else None,
                overheads=own,
                repeats_ttft=repeats([(case.point.configuration, case.point.ttft_s) for case in everything]),
                repeats_tpot=repeats([(case.point.configuration, case.point.tpot_s) for case in everything]),
            )
        )
    return Validation(
        seed=seed,
        skipped=sample.skipped,
        common=common,
        bare=measure([(case, Overheads()) for case in cases]),
        common_error=measure([(case, common) for case in held]),
        own_error=measure(own_predictions),
        groups=tuple(groups),
    )


def split(cases: Sequence[Bare], seed: int) -> tuple[list[Bare], list[Bare]]:
    """(to fit, held out): half of each group's configurations; repeated measurements stay together."""
    rng = np.random.default_rng(seed)
    fitted: set[tuple[object, ...]] = set()
    for group in sorted({case.point.group for case in cases}):
        names = sorted({case.point.configuration for case in _of(cases, group)}, key=str)
        order = rng.permutation(len(names))
        fitted.update(names[index] for index in order[: (len(names) + 1) // 2])
    return (
        [case for case in cases if case.point.configuration in fitted],
        [case for case in cases if case.point.configuration not in fitted],
    )


def fit(cases: Sequence[Bare]) -> Overheads:
    """The overheads with the least squared logarithmic errors of TTFT and TPOT, far outliers damped.

    Raises:
        ConfigError: scipy is not installed.
    """
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise ConfigError("fitting needs scipy: `pip install 'prfaas[simulate]'`") from error
    low, high, start = (np.array(list(asdict(bound).values())) for bound in (_LOW, _HIGH, _START))
    measured = np.log([[case.point.ttft_s, case.point.tpot_s] for case in cases])

    def errors(parameters: np.ndarray) -> np.ndarray:
        overheads = Overheads(*(low + parameters * (high - low)))
        return (np.log([predict(case, overheads) for case in cases]) - measured).reshape(-1)

    # Scaled to 0 … 1: seconds and factors differ by orders of magnitude. Steps are finite ones (`diff_step`),
    # because predictions jump where a batch rounds to the next whole number.
    found = least_squares(
        errors, (start - low) / (high - low), bounds=(0.0, 1.0), loss="soft_l1", f_scale=0.3, diff_step=1e-2
    )
    return Overheads(*(float(value) for value in low + found.x * (high - low)))


def measure(predictions: Sequence[tuple[Bare, Overheads]]) -> Error:
    """Errors of these predictions; NaN where there are none."""
    if not predictions:
        nothing = float("nan")
        return Error(0, nothing, nothing, nothing, nothing, nothing, nothing)
    ratios = np.array(
        [
            np.array(predict(case, overheads)) / (case.point.ttft_s, case.point.tpot_s)
            for case, overheads in predictions
        ]
    )
    errors = np.abs(ratios - 1.0)
    return Error(
        len(predictions),
        *(
            float(value)
            for value in (*_levels(errors[:, 0], ratios[:, 0]), *_levels(errors[:, 1], ratios[:, 1]))
        ),
    )


def repeats(measured: Sequence[tuple[object, float]]) -> float:
    """Median over what was measured more than once of largest ÷ smallest value; NaN if nothing was."""
    values: dict[object, list[float]] = {}
    for name, value in measured:
        values.setdefault(name, []).append(value)
    ratios = [max(found) / min(found) for found in values.values() if len(found) > 1]
    return float(np.median(ratios)) if ratios else float("nan")


def _levels(errors: np.ndarray, ratios: np.ndarray) -> tuple[float, float, float]:
    return float(np.median(errors)), float(np.percentile(errors, 90)), float(np.median(ratios))


def _of(cases: Sequence[Bare], group: Group) -> list[Bare]:
    return [case for case in cases if case.point.group == group]


def _cases(points: Sequence[Point], folder: str | os.PathLike[str] | None) -> list[Bare]:
    names = {name for point in points for name in (point.prefill_table, point.decode_table)}
    spec = HardwareSpec(chunk_tokens=CHUNK_TOKENS, kv_tokens=_UNLIMITED)
    times = {name: TableStepTimes(load_table(name, folder), spec) for name in names}
    return [
        bare(point, times[point.prefill_table], times[point.decode_table], _capacity(point, folder))
        for point in points
    ]


def _capacity(point: Point, folder: str | os.PathLike[str] | None) -> int:
    share = 0.5 if point.precision == "fp8, table bf16" else 1.0
    try:
        return kv_capacity_tokens(point.decode_table, folder, weights_share=share)
    except ConfigError:
        return _UNLIMITED


def _without_nan(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
