"""What one request's choices have become so far, and the updates that make them grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prfaas.protocol.messages import Finished, PrefillReport, TokenLogprobs, Tokens


@dataclass(frozen=True, slots=True)
class Placed:
    """An attempt has been placed (plain words for headers; never shown before the first token)."""

    attempt: int
    kind: str
    decode: str
    site: str
    summary: str


@dataclass(frozen=True, slots=True)
class Restarted:
    """The attempt failed and another begins: what it produced is void."""


Update = Placed | Restarted | PrefillReport | Tokens | Finished


@dataclass(slots=True)
class Choice:
    """One choice of an answer."""

    index: int
    prompt: int
    """Which of the request's prompts it continues."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    completion_tokens: int = 0
    report: PrefillReport | None = None
    placed: Placed | None = None

    def apply(self, update: Update) -> None:
        """Grow by one update."""
        match update:
            case Placed():
                self.placed = update
            case Restarted():
                self.text, self.report = "", None
                self.token_ids.clear()
                self.logprobs.clear()
            case PrefillReport():
                self.report = update
            case Tokens():
                self.text += update.text
                self.token_ids += update.token_ids
                self.logprobs += update.logprobs
            case Finished():
                self.finish_reason = update.finish_reason
                self.completion_tokens = update.completion_tokens


def usage(prompt_tokens: Sequence[int], choices: Sequence[Choice]) -> dict[str, object]:
    """OpenAI's `usage` of an answer.

    Every prompt counts once, however many choices continue it; its cached tokens are those that the site
    which prefilled it for its first choice found in its prefix cache.
    """
    completion = sum(choice.completion_tokens for choice in choices)
    first_of_prompt = {choice.prompt: choice for choice in reversed(choices)}
    cached = sum(
        min(choice.report.cached_tokens, prompt_tokens[prompt])
        for prompt, choice in first_of_prompt.items()
        if choice.report is not None
    )
    prompt_total = sum(prompt_tokens)
    return {
        "prompt_tokens": prompt_total,
        "completion_tokens": completion,
        "total_tokens": prompt_total + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
