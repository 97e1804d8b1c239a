"""From what clients send to token ids and block hashes, without stalling the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Protocol

from prfaas.engine.chat_template import ChatTemplateError
from prfaas.kv.hashing import block_hashes
from prfaas.protocol.openai_errors import ApiError, bad_request

_RENDER_INLINE_CHARS = 32 * 1024
"""Conversations up to this size render in well under a millisecond; larger ones leave the loop."""
_DECODE_INLINE_TOKENS = 1024
"""Text of more tokens than this takes milliseconds."""
_HASH_INLINE_TOKENS = 16 * 1024
"""Hashing this many tokens takes about 0.2 ms at 32 tokens a page."""


class TextModel(Protocol):
    """The model as the gateway sees it: text in, tokens out."""

    name: str
    vocab_size: int

    async def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """Token ids of `text`; `special_tokens` adds what the tokenizer puts around a prompt (BOS)."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for."""
        ...

    def render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        """The conversation as the model's chat template writes it.

        Raises:
            ChatTemplateError: the template refuses the conversation.
        """
        ...


class PromptPipeline:
    """Turns prompts into tokens and hashes."""

    def __init__(self, model: TextModel, page_size: int, executor: Executor) -> None:
        self._model = model
        self._page_size = page_size
        self._executor = executor

    async def chat(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation; the template writes every special token itself.

        Raises:
            ApiError: 400, the template refuses the conversation.
        """
        size = sum(len(message["content"]) for message in messages)

        def render() -> str:
            return self._model.render(messages, add_generation_prompt=add_generation_prompt)

        try:
            if size <= _RENDER_INLINE_CHARS:
                text = render()
            else:
                text = await asyncio.get_running_loop().run_in_executor(self._executor, render)
        except ChatTemplateError as error:
            raise bad_request(str(error), "messages", "invalid_messages") from error
        return await self._model.encode(text, special_tokens=False)

    async def prompt(self, prompt: str | list[int], *, special_tokens: bool = True) -> list[int]:
        """Token ids of a completions prompt.

        Raises:
            ApiError: 400, a token id is not in the vocabulary.
        """
        if isinstance(prompt, str):
            return await self._model.encode(prompt, special_tokens=special_tokens)
        self.check_ids(prompt, "prompt")
        return prompt

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Refuse ids beyond the vocabulary.

        Raises:
            ApiError: 400 that names the id.
        """
        if token_ids and max(token_ids) >= self._model.vocab_size:
            raise bad_request(
                f"`{param}`: {max(token_ids)} is not a token id; the vocabulary has {self._model.vocab_size}",
                param,
            )

    async def text(self, token_ids: Sequence[int]) -> str:
        """Text of token ids.

        Raises:
            ApiError: 400, a token id is not in the vocabulary.
        """
        self.check_ids(token_ids, "tokens")
        if len(token_ids) <= _DECODE_INLINE_TOKENS:
            return self._model.decode(token_ids)
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._model.decode, token_ids)

    async def hashes(self, token_ids: list[int], salt: str) -> list[int]:
        """Chained hashes of the prompt's full blocks."""
        if len(token_ids) <= _HASH_INLINE_TOKENS:
            return block_hashes(token_ids, self._page_size, salt)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, block_hashes, token_ids, self._page_size, salt)


def fit_max_tokens(
    prompt_tokens: int, context_length: int, limit: tuple[str, int | None], default: int, prompt_param: str
) -> int:
    """Most tokens the answer may have.

    Args:
        limit: (name of the client's field, its value or None).
        default: bound where the client names none.

    Raises:
        ApiError: 400 with the counts: an empty prompt, or more tokens than the context holds.
    """
    name, value = limit
    if prompt_tokens == 0:
        raise bad_request("the prompt is empty: 0 tokens", prompt_param, "empty_prompt")
    room = context_length - prompt_tokens
    if room < 1:
        raise ApiError(
            400,
            f"the prompt has {prompt_tokens} tokens; the model's context holds {context_length} "
            "and the answer needs at least 1",
            param=prompt_param,
            code="context_length_exceeded",
        )
    if value is None:
        return min(room, default)
    if value > room:
        raise ApiError(
            400,
            f"`{name}` is {value}, and the prompt has {prompt_tokens} tokens: together more than the "
            f"model's context of {context_length}; at most {room} fit",
            param=name,
            code="context_length_exceeded",
        )
    return value
