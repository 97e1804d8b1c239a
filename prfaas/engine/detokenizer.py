"""Token ids to text while they arrive: whole characters only, and nothing beyond a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from prfaas.engine.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Text of one answer, piece by piece; a character appears with the token that completes it.

    The pieces of `add` and `finish` joined are `Tokenizer.decode` of all tokens. The cost of a token does not
    depend on those before it: its bytes go through an incremental UTF-8 decoder.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; perhaps empty."""
        pieces = [
            self._tokenizer.token_bytes(token_id) for token_id in token_ids if token_id not in self._skipped
        ]
        return self._decoder.decode(b"".join(pieces))

    def finish(self) -> str:
        """The rest: empty, or U+FFFD for a character that was never completed."""
        return self._decoder.decode(b"", final=True)


class StopChecker:
    """Cuts a stream of text before the first stop string, holding back what may be the start of one.

    First means the one whose end comes first, so that the result does not depend on how the text was split
    into pieces. Each stop string is matched by a Knuth-Morris-Pratt automaton: constant time per character.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """
        Raises:
            ValueError: a stop string is empty.
        """
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._automata = [_Automaton(stop) for stop in stops]
        self._held = ""
        self.stopped = False
        """Whether a stop string has been seen; nothing is emitted after it."""

    def add(self, text: str) -> str:
        """The text that can be shown now."""
        if self.stopped:
            return ""
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            complete = [len(automaton.stop) for automaton in self._automata if automaton.feed(character)]
            if complete:
                self.stopped, self._held = True, ""
                return pending[: end - max(complete)]
        shown = len(pending) - max((automaton.matched for automaton in self._automata), default=0)
        self._held = pending[shown:]
        return pending[:shown]

    def finish(self) -> str:
        """The text held back, now that no stop string can follow."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """How much of one stop string the text ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._borders = [0]
        """For each prefix of `stop`: the length of its longest proper prefix that is also its suffix."""
        for character in stop[1:]:
            self._borders.append(self._step(self._borders[-1], character))

    def feed(self, character: str) -> bool:
        """Whether the stop string is complete with this character; not to be fed after that."""
        self.matched = self._step(self.matched, character)
        return self.matched == len(self.stop)

    def _step(self, matched: int, character: str) -> int:
        while matched and self.stop[matched] != character:
            matched = self._borders[matched - 1]
        return matched + (self.stop[matched] == character)
