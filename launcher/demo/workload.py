"""What the demo asks: conversations about long documents, short questions and beginnings to complete.

Every conversation opens with a document, then asks again about the same one once the answer has arrived.
Nothing here says where a request should be computed: the mix of placements comes from costs alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TypeVar

from tokenizers import Tokenizer

from launcher.demo.documents import Document, cut, load_documents

Item = TypeVar("Item")

DEFAULT_REQUESTS = 32
TURNS = 3
_QUESTION_SHARE = 0.25
_DOCUMENT_TOKENS = (300, 400, 500, 600, 700, 900, 1100, 1300)
_ANSWER_TOKENS = (8, 12, 16, 20)
_MEAN_GAP_S = 4.0
"""Between arrivals of conversations and questions, whatever the fleet does: an open loop."""

_OPENERS = (
    "Say in one sentence what this text is for.",
    "What are the first things that a reader should know about this text?",
    "Name one thing that this text defines and say what it does.",
    "Summarize this text briefly.",
)
_FOLLOW_UPS = (
    "Who would use it, and when?",
    "Give one example of its use.",
    "What could go wrong with it?",
    "Is there anything unusual in it?",
    "Say that again in simpler words.",
)
_BEGINNINGS = (
    "The capital of France is",
    "Water boils at",
    "The opposite of cold is",
    "Once upon a time",
    "Roses are red,",
)
_QUESTIONS = (
    "What is the capital of France?",
    "How many legs does a spider have?",
    "Which planet is closest to the sun?",
    "Why is the sky blue?",
    "Translate 'good morning' into Spanish.",
    "What is 12 times 12?",
    "Name three primary colours.",
    "Who wrote Hamlet?",
    "What do bees make?",
    "At what temperature does water boil?",
    "What is a prime number?",
    "Name a mammal that lives in the sea.",
    "What is the opposite of cold?",
    "How long is a leap year?",
    "What does a compass show?",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: a chat's next user message, or a whole prompt in the words of its client."""

    work: str
    """`document`, `follow-up`, `question` or `agent`."""
    text: str
    max_tokens: int
    raw: bool = False
    """A prompt for /v1/completions rather than a user message of a chat."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that follow each other; each waits for the answer to the one before."""

    start_s: float
    turns: tuple[Turn, ...]
    think_s: float = 0.5
    """Between an answer and the next turn."""


@dataclass(frozen=True, slots=True)
class Workload:
    conversations: tuple[Conversation, ...]
    skipped: dict[str, int] = field(default_factory=dict)
    """Prompts left out, by reason."""

    @property
    def requests(self) -> int:
        return sum(len(conversation.turns) for conversation in self.conversations)


def document_workload(tokenizer_path: Path, requests: int, seed: int) -> Workload:
    """`requests` requests over this machine's documents; the same for the same seed and machine."""
    rng = Random(seed)
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    questions = round(requests * _QUESTION_SHARE)
    counts = [TURNS] * ((requests - questions) // TURNS)
    if rest := requests - questions - sum(counts):
        counts.append(rest)
    documents = load_documents(seed)
    sizes = _spread(_DOCUMENT_TOKENS, len(counts), rng)
    openings = [
        _about_document(documents[i % len(documents)], size, turns, tokenizer, rng)
        for i, (size, turns) in enumerate(zip(sizes, counts, strict=True))
    ]
    beginnings = questions // 2
    asked = [(_question(text, rng),) for text in _spread(_QUESTIONS, questions - beginnings, rng)]
    asked += [(_question(text, rng, raw=True),) for text in _spread(_BEGINNINGS, beginnings, rng)]
    return Workload(tuple(_arrivals([*openings, *asked], rng)))


def _about_document(
    document: Document, tokens: int, turns: int, tokenizer: Tokenizer, rng: Random
) -> tuple[Turn, ...]:
    text = cut(document.text, tokens, tokenizer)
    opening = f"This is the beginning of {document.title}:\n\n{text}\n\n{rng.choice(_OPENERS)}"
    follow_ups = rng.sample(_FOLLOW_UPS, turns - 1)
    return (
        Turn("document", opening, rng.choice(_ANSWER_TOKENS)),
        *(Turn("follow-up", follow_up, rng.choice(_ANSWER_TOKENS)) for follow_up in follow_ups),
    )


def _question(text: str, rng: Random, raw: bool = False) -> Turn:
    return Turn("question", text, rng.choice(_ANSWER_TOKENS), raw)


def _spread(items: Sequence[Item], count: int, rng: Random) -> list[Item]:
    """`count` items in random order, each as often as any other."""
    spread = [items[i % len(items)] for i in range(count)]
    rng.shuffle(spread)
    return spread


def _arrivals(threads: list[tuple[Turn, ...]], rng: Random) -> Iterator[Conversation]:
    """Threads in random order at exponential gaps."""
    rng.shuffle(threads)
    start_s = 0.0
    for turns in threads:
        yield Conversation(start_s, turns, think_s=rng.uniform(0.3, 1.0))
        start_s += rng.expovariate(1 / _MEAN_GAP_S)
