"""What one engine step is, between the batch scheduler (control process) and the runner (rank process).

Length-prefixed msgpack over a socket pair, one plan and one result per step. The runner keeps no state per
sequence: everything a step needs is in its plan, and random numbers are drawn from (seed, position).
"""

from __future__ import annotations

import msgspec

from prfaas.protocol.messages import Sampling, TokenLogprobs


class SequenceStep(msgspec.Struct, frozen=True):
    """One sequence's part of a step."""

    token_ids: list[int]
    """Input tokens: a prefill chunk, or the one token of a decode step."""
    start: int
    """Position of token_ids[0]; KV before it is in the pages."""
    page_ids: list[int]
    """Pages of positions 0 … start + len(token_ids) - 1, in order."""
    sampling: Sampling | None
    """Not None: sample a token from the last position's logits."""


class StepPlan(msgspec.Struct, frozen=True):
    step: int
    sequences: list[SequenceStep]


class StepResult(msgspec.Struct, frozen=True, tag="result"):
    step: int
    token_ids: list[int]
    """One per sequence with `sampling`, in plan order."""
    logprobs: list[TokenLogprobs | None]
    """Parallel to token_ids; None where not asked for."""
    elapsed_s: float


class RunnerReady(msgspec.Struct, frozen=True, tag="ready"):
    """The runner's first message, once the model is loaded."""

    vocab_size: int


class RunnerError(msgspec.Struct, frozen=True, tag="error"):
    """The step failed; the runner stays alive."""

    step: int
    message: str


RunnerMessage = RunnerReady | StepResult | RunnerError
