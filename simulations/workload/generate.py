"""Workloads made up from a few numbers, for people without traces: seeded, vectorised, a million in seconds.

`generate:FAMILY?option=value&…` names one. Families: `lognormal` (lengths of the PrfaaS case study, Poisson
arrivals), `burst` (the same in bursts), `prefix` (a tree of shared prefixes), `agentic` (conversations that
grow). docs/simulation-formats.md lists the options.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from prfaas.config import Section
from prfaas.errors import ConfigError
from simulations.workload.trace import Floats, Ints, Trace, counting

MAX_REQUESTS = 10_000_000
MAX_BLOCKS = 400_000_000
"""3.2 GB of block ids."""


class Common(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    requests: int = 5000
    rate: float = 1.0
    """Mean requests per second."""
    cv: float = 1.0
    """Coefficient of variation of the gaps: 1 = Poisson, more = bursts (Gamma), 0 = a metronome."""
    seed: int = 0
    output_tokens: float = 1024.0
    """Mean answer."""
    output_sigma: float = 0.0
    """Spread of the answers' logarithm; 0 = all alike."""
    block_tokens: int = 512


class Lognormal(Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompts without anything in common."""

    mu: float = 9.90
    sigma: float = 1.00
    min_tokens: int = 128
    max_tokens: int = 131_072


class Burst(Lognormal, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cv: float = 4.0


class Prefix(Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompts that begin with a path from the root to a leaf of a tree, then go on alone."""

    levels: int = 3
    fanout: int = 8
    """Children of each node; the first level has one node, which every prompt shares."""
    level_tokens: int = 2048
    """Of each node; a multiple of `block_tokens`."""
    zipf: float = 1.0
    """Popularity of the leaf of rank r is r^-zipf."""
    tail_tokens: float = 2000.0
    """Mean of what follows the path."""
    tail_sigma: float = 1.0
    output_tokens: float = 300.0


class Agentic(Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conversations: each turn's prompt is the former one, its answer, and something new."""

    turns: float = 12.0
    """Mean turns of a conversation (geometric)."""
    prefix_tokens: int = 8192
    """Tools and system prompt, the same in all conversations."""
    first_tokens: float = 2000.0
    """Mean of the task that begins a conversation."""
    turn_tokens: float = 1500.0
    """Mean of what a tool's result or a person adds."""
    token_sigma: float = 1.0
    """Spread of both on the log scale."""
    max_tokens: int = 131_072
    """A conversation ends before its prompt would exceed this."""
    think_s: float = 5.0
    """Mean time from an answer to the next turn (exponential)."""
    output_tokens: float = 400.0
    output_sigma: float = 1.0
    token_s: float = 0.02
    """Seconds per output token assumed for the arrivals of an open-loop replay."""


FAMILIES: dict[str, type[Common]] = {
    "lognormal": Lognormal,
    "burst": Burst,
    "prefix": Prefix,
    "agentic": Agentic,
}


def generate(options: Common, name: str) -> Trace:
    """The workload that `options` describe, called `name`.

    Raises:
        ConfigError: an option out of its range.
    """
    _check(options, name)
    makers: dict[type[Common], Callable[[Any, str], Trace]] = {
        Lognormal: _lognormal,
        Burst: _lognormal,
        Prefix: _prefix,
        Agentic: _agentic,
    }
    return makers[type(options)](options, name)


_RANGES: dict[str, tuple[float, float]] = {
    "requests": (1, MAX_REQUESTS), "rate": (1e-6, 1e6), "cv": (0, 100), "seed": (0, 2**63),
    "output_tokens": (1, 1e6), "output_sigma": (0, 5), "block_tokens": (1, 2**20),
    "mu": (0, 16), "sigma": (0, 5), "min_tokens": (2, 2**24), "max_tokens": (2, 2**24),
    "levels": (1, 20), "fanout": (1, 1_000_000), "level_tokens": (1, 2**20), "zipf": (0, 10),
    "tail_tokens": (1, 1e6), "tail_sigma": (0, 5), "turns": (1, 1e4), "prefix_tokens": (0, 2**20),
    "first_tokens": (1, 1e6), "turn_tokens": (1, 1e6), "token_sigma": (0, 5), "think_s": (0, 1e6),
    "token_s": (0, 10),
}  # fmt: skip


def _check(options: Common, name: str) -> None:
    for field in options.__struct_fields__:
        low, high = _RANGES[field]
        value = getattr(options, field)
        if not low <= value <= high:
            raise ConfigError(f"generate:{name}: `{field}` must be {low:g} … {high:g}, got {value}")


def _refuse(name: str, problem: str) -> ConfigError:
    return ConfigError(f"generate:{name}: {problem}")


# ---------------------------------------------------------------- parts


def arrivals(count: int, rate: float, cv: float, rng: np.random.Generator) -> Floats:
    """Moments of a renewal process with Gamma gaps (shape 1 / cv²), the first at 0."""
    if cv == 0.0:
        gaps = np.full(count, 1.0 / rate)
    else:
        shape = 1.0 / cv**2
        gaps = rng.gamma(shape, 1.0 / (rate * shape), count)
    gaps[0] = 0.0
    return np.cumsum(gaps)


def lengths(count: int, mean: float, sigma: float, rng: np.random.Generator) -> Ints:
    """Log-normal with this mean and spread, at least 1."""
    if sigma == 0.0:
        return np.full(count, max(1, round(mean)), dtype=np.int64)
    drawn = rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(np.rint(drawn), 1, 2**22).astype(np.int64)


def truncated_lognormal(count: int, options: Lognormal, rng: np.random.Generator, name: str) -> Ints:
    """exp(Normal(mu, sigma)) given that it lies in [min_tokens, max_tokens], by drawing again what does not.

    Raises:
        ConfigError: hardly anything lies there.
    """
    kept = np.zeros(0)
    for _ in range(100):
        drawn = rng.lognormal(options.mu, options.sigma, count)
        inside = drawn[(drawn >= options.min_tokens) & (drawn <= options.max_tokens)]
        kept = np.concatenate([kept, inside])
        if len(kept) >= count:
            return np.rint(kept[:count]).astype(np.int64)
    raise _refuse(name, "`min_tokens` … `max_tokens` holds under 1 % of the distribution")


# ---------------------------------------------------------------- families


def _lognormal(options: Lognormal, name: str) -> Trace:
    if options.min_tokens > options.max_tokens:
        raise _refuse(name, "`min_tokens` is above `max_tokens`")
    rng = np.random.default_rng(options.seed)
    return Trace(
        name=name,
        arrival_s=arrivals(options.requests, options.rate, options.cv, rng),
        prompt_tokens=truncated_lognormal(options.requests, options, rng, name),
        output_tokens=lengths(options.requests, options.output_tokens, options.output_sigma, rng),
        block_tokens=options.block_tokens,
    )


def _prefix(options: Prefix, name: str) -> Trace:
    if options.level_tokens % options.block_tokens:
        raise _refuse(name, "`level_tokens` must be a multiple of `block_tokens`")
    leaves = options.fanout ** (options.levels - 1)
    per_level = options.level_tokens // options.block_tokens
    if leaves > 1_000_000 or leaves * per_level > 100_000_000:
        raise _refuse(name, f"`fanout` and `levels` make {leaves} leaves; at most a million")
    rng = np.random.default_rng(options.seed)
    arrival_s = arrivals(options.requests, options.rate, options.cv, rng)
    popularity = np.cumsum(np.arange(1, leaves + 1, dtype=np.float64) ** -options.zipf)
    ranks = np.searchsorted(popularity / popularity[-1], rng.random(options.requests), side="right")
    leaf = rng.permutation(leaves)[np.minimum(ranks, leaves - 1)]
    tails = lengths(options.requests, options.tail_tokens, options.tail_sigma, rng)
    prompts = options.levels * options.level_tokens + tails

    path = np.zeros((options.requests, options.levels * per_level), dtype=np.int64)
    first_id = 0
    for level in range(options.levels):
        node = leaf // options.fanout ** (options.levels - 1 - level)
        ids = first_id + node[:, None] * per_level + np.arange(per_level)
        path[:, level * per_level : (level + 1) * per_level] = ids
        first_id += options.fanout**level * per_level
    tail_blocks = tails // options.block_tokens
    blocks, offsets = _joined(path, tail_blocks, first_id, name)
    return Trace(
        name=name,
        arrival_s=arrival_s,
        prompt_tokens=prompts,
        output_tokens=lengths(options.requests, options.output_tokens, options.output_sigma, rng),
        block_tokens=options.block_tokens,
        blocks=blocks,
        block_offsets=offsets,
    )


def _joined(path: Ints, own: Ints, first_id: int, name: str) -> tuple[Ints, Ints]:
    """(blocks, offsets): each row of `path`, then as many new ids (from `first_id` on) as `own` says."""
    within, offsets = _counted(own + path.shape[1], name)
    own_starts = first_id + np.concatenate([[0], np.cumsum(own)[:-1]])
    request = np.repeat(np.arange(len(own)), own + path.shape[1])
    blocks = own_starts[request] + within - path.shape[1]
    shared = within < path.shape[1]
    blocks[shared] = path.reshape(-1)
    return blocks, offsets


def _counted(counts: Ints, name: str) -> tuple[Ints, Ints]:
    if counts.sum() > MAX_BLOCKS:
        raise _refuse(name, f"makes {counts.sum()} blocks; ask for fewer requests or larger `block_tokens`")
    return counting(counts)


def _agentic(options: Agentic, name: str) -> Trace:
    if options.prefix_tokens % options.block_tokens:
        raise _refuse(name, "`prefix_tokens` must be a multiple of `block_tokens`")
    if options.prefix_tokens + 2 > options.max_tokens:
        raise _refuse(name, "`prefix_tokens` leaves no room below `max_tokens`")
    rng = np.random.default_rng(options.seed)
    session, prompts, answers, think_s = _conversations(options, rng)
    begins = np.flatnonzero(np.diff(session, prepend=-1))
    starts = arrivals(len(begins), options.rate * len(begins) / len(session), options.cv, rng)
    waits = think_s.copy()
    waits[1:] += answers[:-1] * options.token_s
    waits[begins] = 0.0
    since = np.cumsum(waits)
    arrival_s = starts[session] + since - since[begins][session]

    order = np.argsort(arrival_s, kind="stable")[: options.requests]
    blocks, offsets = _conversation_blocks(options, session[order], prompts, session, prompts[order], name)
    return Trace(
        name=name,
        arrival_s=arrival_s[order] - arrival_s[order[0]],
        prompt_tokens=prompts[order],
        output_tokens=answers[order],
        block_tokens=options.block_tokens,
        blocks=blocks,
        block_offsets=offsets,
        session=np.unique(session[order], return_inverse=True)[1].astype(np.int64).reshape(-1),
        think_s=think_s[order],
    )


def _conversations(options: Agentic, rng: np.random.Generator) -> tuple[Ints, Ints, Ints, Floats]:
    """(session, prompt tokens, answer tokens, think time) by turn, session after session.

    At least `requests` turns. The think time of a first turn is 0.
    """
    parts: list[tuple[Ints, ...]] = []
    made, sessions = 0, 0
    while made < options.requests:
        count = max(16, int(1.1 * (options.requests - made) / options.turns) + 1)
        turns = rng.geometric(1.0 / options.turns, count)
        within, offsets = counting(turns)
        total = int(offsets[-1])
        answers = lengths(total, options.output_tokens, options.output_sigma, rng)
        added = lengths(total, options.turn_tokens, options.token_sigma, rng)
        added[offsets[:-1]] = options.prefix_tokens + lengths(
            count, options.first_tokens, options.token_sigma, rng
        )
        added[1:] += np.where(within[1:] > 0, answers[:-1], 0)
        sums = np.cumsum(added)
        prompts = sums - np.repeat(sums[offsets[:-1]] - added[offsets[:-1]], turns)
        kept = prompts <= options.max_tokens
        session = sessions + np.repeat(np.arange(count), turns)
        parts.append((session[kept], prompts[kept], answers[kept], within[kept]))
        made += int(kept.sum())
        sessions += count
    session, prompts, answers, within = (np.concatenate(column) for column in zip(*parts, strict=True))
    session = np.unique(session, return_inverse=True)[1].astype(np.int64).reshape(-1)
    think_s = np.where(within > 0, rng.exponential(options.think_s, len(session)), 0.0)
    return session, np.maximum(prompts, 2), answers, think_s


def _conversation_blocks(
    options: Agentic, session: Ints, all_prompts: Ints, all_sessions: Ints, prompts: Ints, name: str
) -> tuple[Ints, Ints]:
    """(blocks, offsets): ids of the common prefix, then those of the conversation, alike in all its turns."""
    shared = options.prefix_tokens // options.block_tokens
    longest = np.zeros(int(all_sessions[-1]) + 1, dtype=np.int64)
    np.maximum.at(longest, all_sessions, all_prompts // options.block_tokens)
    first_id = shared + np.concatenate([[0], np.cumsum(np.maximum(longest - shared, 0))[:-1]])
    counts = prompts // options.block_tokens
    within, offsets = _counted(counts, name)
    own_from = np.repeat(first_id[session] - shared, counts)
    own_from[within < shared] = 0
    within += own_from
    return within, offsets
