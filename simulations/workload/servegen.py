"""ServeGen's per-client statistics of production traffic → arrivals and lengths drawn from them, seeded.

For each client `*-trace.csv` has rows (time s, requests per s, CV, family, shape, scale), one per window
of ten minutes, and `*-dataset.json` has histograms of input and output tokens by the second of the day from
which on they hold. In each window a client's arrivals are a renewal process: gaps from the Gamma or Weibull
family with the row's shape, and the mean that the row's rate asks for. There is no prefix identity.
"""

from __future__ import annotations

import ast
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prfaas.config import Section
from prfaas.errors import ConfigError
from simulations.workload.archive import members
from simulations.workload.files import trace_name
from simulations.workload.trace import Floats, Ints, Trace

WINDOW_S = 600.0
_TRACE, _DATASET = "-trace.csv", "-dataset.json"


class Options(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    seed: int = 0
    start_s: float = 43_200.0
    """Second of the day at which the trace begins."""
    duration_s: float = 3600.0
    scale: float = 1.0
    """Of every client's rate."""


@dataclass(frozen=True, slots=True)
class Window:
    begin_s: float
    rate_per_s: float
    family: str
    shape: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """Token counts and their cumulative probabilities."""

    tokens: Ints
    cumulative: Floats

    def draw(self, uniform: Floats) -> Ints:
        places = np.searchsorted(self.cumulative, uniform, side="right")
        return self.tokens[np.minimum(places, len(self.tokens) - 1)]


def read(path: Path, options: Options) -> Trace:
    """A trace drawn from the statistics in a folder or an archive.

    Raises:
        ConfigError: the statistics are damaged, or nobody sends anything in the asked time.
    """
    if not (options.duration_s > 0 and options.scale > 0 and options.start_s >= 0):
        raise ConfigError(f"{path}: `duration_s` and `scale` must be above 0, `start_s` 0 or more")
    if options.duration_s > 86_400:
        raise ConfigError(f"{path}: `duration_s` is more than the day that the statistics cover")
    windows = {name.removesuffix(_TRACE): _windows(path, name, data) for name, data in members(path, _TRACE)}
    datasets = {name.removesuffix(_DATASET): data for name, data in members(path, _DATASET)}
    arrivals, prompts, answers = [], [], []
    for index, (client, rows) in enumerate(windows.items()):
        rng = np.random.default_rng([options.seed, index])
        moments = _arrivals(rows, options, rng)
        if not len(moments):
            continue
        if client not in datasets:
            raise ConfigError(f"{path} lacks {client}{_DATASET}")
        lengths = _lengths(path, client, datasets[client], moments, rng)
        arrivals.append(moments)
        prompts.append(lengths[0])
        answers.append(lengths[1])
    if not arrivals:
        raise ConfigError(f"{path}: no client sends anything from {options.start_s} s on")
    arrival_s = np.concatenate(arrivals)
    order = np.argsort(arrival_s, kind="stable")
    return Trace(
        name=trace_name(path),
        arrival_s=arrival_s[order] - arrival_s.min(),
        prompt_tokens=np.maximum(np.concatenate(prompts)[order], 2),
        output_tokens=np.maximum(np.concatenate(answers)[order], 1),
    )


def _windows(path: Path, name: str, data: bytes) -> list[Window]:
    windows = []
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), start=1):
        where = f"{path}/{name}, line {number}"
        cells = line.split(",")
        if len(cells) != 6:
            raise ConfigError(
                f"{where}: {len(cells)} cells, 6 expected (time, rate, CV, family, shape, scale)"
            )
        try:
            begin_s, rate, _, _, shape, _ = (float(cell) if cell != cells[3] else 0.0 for cell in cells)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
        if not (math.isfinite(begin_s) and 0.0 <= rate < 1e6 and 0.0 <= shape < 1e6):
            raise ConfigError(f"{where}: time, rate and shape must be finite and not negative")
        if rate > 0.0:
            if cells[3] not in ("Gamma", "Weibull") or shape <= 0.0:
                raise ConfigError(
                    f"{where}: family is `{cells[3]}` with shape {shape}; Gamma or Weibull above 0"
                )
            windows.append(Window(begin_s, rate, cells[3], shape))
    return windows


def _arrivals(windows: list[Window], options: Options, rng: np.random.Generator) -> Floats:
    end_s = options.start_s + options.duration_s
    parts = [np.zeros(0)]
    for window in windows:
        begin, end = max(window.begin_s, options.start_s), min(window.begin_s + WINDOW_S, end_s)
        if begin < end:
            parts.append(begin + _renewals(window, options.scale, end - begin, rng))
    return np.concatenate(parts)


def _renewals(window: Window, scale: float, length_s: float, rng: np.random.Generator) -> Floats:
    """Moments in [0, length_s) of a renewal process; of its first gap a random part has passed."""
    mean_s = 1.0 / (window.rate_per_s * scale)
    moments: list[Floats] = []
    last_s = 0.0
    while last_s < length_s:
        count = int(1.2 * (length_s - last_s) / mean_s) + 16
        if window.family == "Gamma":
            gaps = rng.gamma(window.shape, mean_s / window.shape, count)
        else:
            gaps = rng.weibull(window.shape, count) * (mean_s / math.gamma(1.0 + 1.0 / window.shape))
        if not moments:
            gaps[0] *= rng.random()
        moments.append(last_s + np.cumsum(gaps))
        last_s = float(moments[-1][-1])
    found = np.concatenate(moments)
    return found[found < length_s]


def _lengths(
    path: Path, client: str, data: bytes, moments: Floats, rng: np.random.Generator
) -> tuple[Ints, Ints]:
    where = f"{path}/{client}{_DATASET}"
    try:
        tree = json.loads(data)
        begins = sorted(float(begin) for begin in tree)
        keys = {float(begin): begin for begin in tree}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where}: {error}") from error
    prompts, answers = np.zeros(len(moments), dtype=np.int64), np.zeros(len(moments), dtype=np.int64)
    at = np.maximum(np.searchsorted(begins, moments, side="right") - 1, 0)
    for place in np.unique(at):
        rows = at == place
        entry = tree[keys[begins[place]]]
        prompts[rows] = _histogram(where, entry, "input_tokens").draw(rng.random(int(rows.sum())))
        answers[rows] = _histogram(where, entry, "output_tokens").draw(rng.random(int(rows.sum())))
    return prompts, answers


def _histogram(where: str, entry: dict[str, str], name: str) -> Histogram:
    """From the text of a dictionary {tokens: share}."""
    try:
        shares = ast.literal_eval(entry[name])
        tokens = np.array(list(shares), dtype=np.int64)
        cumulative = np.cumsum(np.array(list(shares.values()), dtype=np.float64))
    except (KeyError, ValueError, SyntaxError, TypeError) as error:
        raise ConfigError(f"{where}: `{name}` is no histogram: {error!r}") from error
    if not len(tokens) or not cumulative[-1] > 0 or (tokens < 0).any():
        raise ConfigError(f"{where}: `{name}` is an empty histogram, or has negative lengths")
    return Histogram(tokens, cumulative / cumulative[-1])
