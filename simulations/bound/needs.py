"""What each request takes from the fleet at the very least, by the way it goes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prfaas.errors import ConfigError
from simulations.bound.places import Place, Places
from simulations.bound.prefix import seen_before
from simulations.fleet import ModelSpec
from simulations.workload.trace import Floats, Ints, Trace


@dataclass(frozen=True, slots=True)
class Needs:
    """Least needs; arrays have one row per request unless said otherwise."""

    steps: Floats
    """Decode steps: one per output token; the first computes the last prompt token."""
    context_steps: Floats
    """Sum over the steps of the tokens held."""
    page_steps: Floats
    """Sum over the steps of the pages held that no earlier request's prompt has."""
    pages: Floats
    """Pages of the prompt that no earlier request's prompt has."""
    kv_bytes: Floats
    """Pages that decode lacks, whole, and the fixed state: what prefill elsewhere must send."""
    prefill_s: Floats
    """[groups, requests] seconds of a worker of each group; infinite where the prompt does not fit."""
    local_s: Floats
    """[groups, requests] the same on a decode worker whose every chunk rides on a decode step."""

    def __len__(self) -> int:
        return len(self.steps)

    def rows(self, index: Ints) -> Needs:
        """These requests only."""
        return Needs(
            self.steps[index],
            self.context_steps[index],
            self.page_steps[index],
            self.pages[index],
            self.kv_bytes[index],
            self.prefill_s[:, index],
            self.local_s[:, index],
        )


def least_needs(trace: Trace, model: ModelSpec, page_size: int, where: Places, first: int = 0) -> Needs:
    """Needs of requests `first` … of `trace`; the ones before only fill the caches.

    Caches are as good as caches can be: see `seen_before`.

    Raises:
        ConfigError: a request fits no way through the fleet.
    """
    cached = seen_before(trace.repaged(page_size))[first:]
    prefilled = trace.prompt_tokens[first:] - 1
    cached = np.minimum(cached, prefilled)
    new = prefilled - cached
    outputs = trace.output_tokens[first:]
    # Page sums: the pages of x tokens are ceil(x / page); whole pages of the cached prefix may be another's.
    shared_pages = cached // page_size
    page_steps = _sum_of_pages(prefilled, outputs, page_size) - outputs * shared_pages
    prefill_s = np.array([_prefill_s(place, new, cached) for place in where.groups])
    saving_s = np.array([_saving_s(place, new) for place in where.groups])
    pages = -(-prefilled // page_size) - shared_pages
    sent = pages * page_size * model.kv_bytes_per_token + model.state_bytes
    needs = Needs(
        steps=outputs.astype(np.float64),
        context_steps=outputs * prefilled + outputs * (outputs - 1) / 2.0,
        page_steps=page_steps.astype(np.float64),
        pages=pages.astype(np.float64),
        kv_bytes=sent.astype(np.float64),
        prefill_s=prefill_s,
        local_s=np.maximum(prefill_s - saving_s, 0.0),
    )
    _refuse_hopeless(needs, where, trace, first)
    return needs


def _sum_of_pages(prefilled: Ints, outputs: Ints, page_size: int) -> Ints:
    """Sum of ceil((prefilled + t) / page_size) over t = 0 … outputs - 1."""

    def up_to(tokens: Ints) -> Ints:
        """Sum of ceil(x / page_size) over x = 0 … tokens."""
        whole, rest = tokens // page_size, tokens % page_size
        return page_size * whole * (whole + 1) // 2 + rest * (whole + 1)

    return up_to(prefilled + outputs - 1) - up_to(prefilled - 1)


def _prefill_s(place: Place, new: Ints, cached: Ints) -> Floats:
    """Seconds by request; equal (new, cached) are asked for once."""
    pairs, inverse = np.unique(np.column_stack([new, cached]), axis=0, return_inverse=True)
    seconds = np.array([place.times.prefill_s(n, c) if n else 0.0 for n, c in pairs.tolist()])
    found: Floats = seconds[inverse.reshape(-1)]
    found[new + cached > place.kv_tokens] = np.inf
    return found


def _saving_s(place: Place, new: Ints) -> Floats:
    chunks = -(-new // place.times.chunk_tokens)
    return chunks.astype(np.float64) * place.times.shared_base_s()


def _refuse_hopeless(needs: Needs, where: Places, trace: Trace, first: int) -> None:
    fits = np.zeros(len(needs), dtype=np.bool_)
    for way in where.ways:
        fits |= np.isfinite(needs.prefill_s[way.site]) & np.isfinite(needs.prefill_s[way.decode])
    if not fits.all():
        index = int(np.flatnonzero(~fits)[0])
        raise ConfigError(
            f"trace {trace.name}: request {first + index} of {trace.prompt_tokens[first + index]:,} prompt "
            "tokens fits no decode worker's KV pool (`kv_tokens`) together with a prefill site; drop it or "
            "use bigger workers"
        )
