"""Sampled tokens to the text of one answer: whole characters, stop strings cut off."""

from __future__ import annotations

from pathlib import Path

from prfaas.engine.detokenizer import IncrementalDetokenizer, StopChecker
from prfaas.engine.interface import SequenceEvent
from prfaas.engine.tokenizer import Tokenizer
from prfaas.protocol.messages import Sampling, Tokens


class TextStream:
    """Text of one answer.

    Attributes:
        completion_tokens: tokens generated so far, the one that ended the answer included.
    """

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self.completion_tokens = 0
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stops = StopChecker(stops)

    def push(self, event: SequenceEvent) -> tuple[Tokens | None, str | None]:
        """What to stream for `event`, and why the answer ends with it (`stop`, `length`; None = it goes on).

        The token that ended an answer is counted and reported, but has no text.
        """
        if not event.token_ids and event.finish_reason is None:
            return None, None
        self.completion_tokens += len(event.token_ids)
        shown = event.token_ids[:-1] if event.finish_reason == "stop" else event.token_ids
        text = self._detokenizer.add(shown)
        if event.finish_reason is not None:
            text += self._detokenizer.finish()
        text = self._stops.add(text)
        reason = "stop" if self._stops.stopped else event.finish_reason
        if reason is not None:
            text += self._stops.finish()
        return Tokens(token_ids=event.token_ids, text=text, logprobs=event.logprobs), reason


class TextStreams:
    """Makes text streams over one tokenizer."""

    def __init__(self, model_path: Path) -> None:
        self._tokenizer = Tokenizer(model_path)

    def stream(self, sampling: Sampling) -> TextStream:
        return TextStream(self._tokenizer, sampling.stop)
