"""Bodies of OpenAI answers: whole, and as the chunks of an event stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from prfaas.protocol.messages import TokenLogprobs
from router.answer import Choice

TokenBytes = Callable[[int], bytes]
"""The bytes that a token id stands for."""


class Shape(Protocol):
    """How one endpoint writes its answers."""

    def whole(self, choices: Sequence[Choice], usage: dict[str, object]) -> bytes:
        """The JSON body of an answer that is not streamed."""
        ...

    def delta(self, index: int, text: str, ids: list[int], logprobs: list[TokenLogprobs]) -> bytes:
        """A server-sent event with new text of choice `index`."""
        ...

    def closing(self, index: int, finish_reason: str) -> bytes:
        """The last event of a choice."""
        ...

    def usage(self, usage: dict[str, object]) -> bytes:
        """The event that reports usage after the last choice has ended."""
        ...


class _Envelope:
    """What chat and completions have in common."""

    def __init__(
        self, request_id: str, model: str, token_bytes: TokenBytes, *, with_usage: bool, with_ids: bool
    ) -> None:
        self._id = request_id
        self._model = model
        self._created = int(time.time())
        self._token_bytes = token_bytes
        self._with_usage = with_usage
        self._with_ids = with_ids

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _event(self, kind: str, choice: dict[str, Any]) -> bytes:
        body = self._body(kind, [choice])
        if self._with_usage:
            body["usage"] = None
        return sse(body)

    def _usage_event(self, kind: str, usage: dict[str, object]) -> bytes:
        return sse({**self._body(kind, []), "usage": usage})

    def _ids(self, ids: list[int]) -> dict[str, Any]:
        return {"token_ids": ids} if self._with_ids else {}

    def _text(self, token_id: int) -> str:
        return self._token_bytes(token_id).decode("utf-8", "replace")


class ChatShape(_Envelope):
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._opened: set[int] = set()

    def whole(self, choices: Sequence[Choice], usage: dict[str, object]) -> bytes:
        shown = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice.token_ids, choice.logprobs),
                "finish_reason": choice.finish_reason,
                **self._ids(choice.token_ids),
            }
            for choice in choices
        ]
        return msgspec.json.encode({**self._body("chat.completion", shown), "usage": usage})

    def delta(self, index: int, text: str, ids: list[int], logprobs: list[TokenLogprobs]) -> bytes:
        """The first event of a choice names its role, as OpenAI's does."""
        extra = {"logprobs": self._logprobs(ids, logprobs), **self._ids(ids)}
        return self._opening(index) + self._chunk(index, {"content": text}, None, extra)

    def closing(self, index: int, finish_reason: str) -> bytes:
        return self._opening(index) + self._chunk(index, {}, finish_reason, {"logprobs": None})

    def usage(self, usage: dict[str, object]) -> bytes:
        return self._usage_event("chat.completion.chunk", usage)

    def _opening(self, index: int) -> bytes:
        if index in self._opened:
            return b""
        self._opened.add(index)
        return self._chunk(index, {"role": "assistant", "content": ""}, None, {"logprobs": None})

    def _chunk(self, index: int, delta: dict[str, Any], finish: str | None, extra: dict[str, Any]) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish, **extra}
        return self._event("chat.completion.chunk", choice)

    def _logprobs(self, ids: list[int], logprobs: list[TokenLogprobs]) -> dict[str, Any] | None:
        if not logprobs:
            return None
        return {
            "content": [
                {
                    **self._entry(token_id, one.logprob),
                    "top_logprobs": [self._entry(top_id, logprob) for top_id, logprob in one.top],
                }
                for token_id, one in zip(ids, logprobs, strict=False)
            ],
            "refusal": None,
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


class CompletionShape(_Envelope):
    """`text_completion`, whole and in chunks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._offsets: dict[int, int] = {}

    def whole(self, choices: Sequence[Choice], usage: dict[str, object]) -> bytes:
        shown = [
            self._choice(choice.index, choice.text, choice.token_ids, choice.logprobs, choice.finish_reason)
            for choice in choices
        ]
        return msgspec.json.encode({**self._body("text_completion", shown), "usage": usage})

    def delta(self, index: int, text: str, ids: list[int], logprobs: list[TokenLogprobs]) -> bytes:
        return self._event("text_completion", self._choice(index, text, ids, logprobs, None))

    def closing(self, index: int, finish_reason: str) -> bytes:
        return self._event("text_completion", self._choice(index, "", [], [], finish_reason))

    def usage(self, usage: dict[str, object]) -> bytes:
        return self._usage_event("text_completion", usage)

    def _choice(
        self, index: int, text: str, ids: list[int], logprobs: list[TokenLogprobs], finish: str | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, ids, logprobs),
            "finish_reason": finish,
            **self._ids(ids),
        }

    def _logprobs(self, index: int, ids: list[int], logprobs: list[TokenLogprobs]) -> dict[str, Any] | None:
        if not logprobs:
            return None
        tokens = [self._text(token_id) for token_id in ids]
        offsets = []
        for token in tokens:
            at = self._offsets.get(index, 0)
            offsets.append(at)
            self._offsets[index] = at + len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": [
                {self._text(top_id): logprob for top_id, logprob in ((token_id, one.logprob), *one.top)}
                for token_id, one in zip(ids, logprobs, strict=False)
            ],
            "text_offset": offsets,
        }


def sse(body: object) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"
