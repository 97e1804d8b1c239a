"""A runner without a model: it writes tokens where KV would go, and answers from what it reads there.

Its next token depends on every token of the context *as found through the page table*, so any misuse of
pages (another sequence's page, a page freed too early, a hole) changes the answer.
"""

from __future__ import annotations

import xxhash

from prfaas.engine.step import StepPlan, StepResult
from prfaas.kv.hashing import pack_tokens

VOCABULARY = 50


def next_token(context: list[int]) -> int:
    """The token that follows `context`."""
    return xxhash.xxh3_64_intdigest(pack_tokens(context)) % VOCABULARY


def generate(prompt: list[int], n: int) -> list[int]:
    """`n` tokens after `prompt`, computed without pages."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class PagedFake:
    """Executes steps over `slots`: (page, slot) → token."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.slots: dict[tuple[int, int], int] = {}
        self.plans: list[StepPlan] = []

    def write(self, page_ids: list[int], start: int, tokens: list[int]) -> None:
        """Store `tokens` at positions start, start + 1, … of the sequence in `page_ids`."""
        for position, token in enumerate(tokens, start):
            self.slots[page_ids[position // self.page_size], position % self.page_size] = token

    def read(self, page_ids: list[int], end: int) -> list[int]:
        """Tokens of positions [0, end) as the pages hold them; -1 where nothing was written."""
        return [self.slots.get((page_ids[p // self.page_size], p % self.page_size), -1) for p in range(end)]

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        for sequence in plan.sequences:
            self.write(sequence.page_ids, sequence.start, sequence.token_ids)
        tokens = [
            next_token([t & 0xFFFFFFFF for t in self.read(s.page_ids, s.start + len(s.token_ids))])
            for s in plan.sequences
            if s.sampling is not None
        ]
        return StepResult(step=plan.step, token_ids=tokens, logprobs=[None] * len(tokens), elapsed_s=0.0)
