"""The served model's tokenizer and chat template, from its HF folder (no weights, no torch)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prfaas.engine.chat_template import ChatTemplate, ChatTemplateError
from prfaas.engine.tokenizer import Tokenizer


class HFTextModel:
    """Implements `router.prompts.TextModel`.

    Raises:
        ConfigError: the folder lacks a file, or one cannot be understood.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self._tokenizer = Tokenizer(path)
        self._template = ChatTemplate.load(path)
        self.vocab_size = self._tokenizer.vocab_size

    async def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        return await self._tokenizer.encode_async(text, add_special_tokens=special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """Ids that only pad the embedding stand for no bytes."""
        return self._tokenizer.token_bytes(token_id) if token_id < self.vocab_size else b""

    def render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        if self._template is None:
            raise ChatTemplateError("the model has no chat template; use /v1/completions")
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)
