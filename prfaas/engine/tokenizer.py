"""Text to token ids, by the model's own tokenizer.json; and the bytes that each token stands for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tokenizers

from prfaas.engine.model_config import LlamaConfig
from prfaas.errors import ConfigError

_WORD_START = "\u2581"
"""SentencePiece's mark for a space."""
_SENTENCEPIECE_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class Tokenizer:
    """A model's tokenizer.

    On an event loop use `encode_async`: `encode` holds the loop for as long as it computes, also in a thread.

    Attributes:
        eos_token_ids: every id that ends an answer.
        special_token_ids: control tokens, left out of decoded text.
        vocab_size: number of tokens; the model's own vocabulary may be padded beyond it.
    """

    def __init__(self, model_path: Path) -> None:
        """Load `tokenizer.json` and the end-of-answer ids.

        Raises:
            ConfigError: a file is missing or unreadable, or the decoder is of a kind not understood.
        """
        path = model_path / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{path} is not a readable tokenizer: {error}") from error
        # A file may ask for truncation or padding, left over from training; prompts must stay whole.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._to_bytes = _token_to_bytes(json.loads(path.read_text(encoding="utf-8")).get("decoder"), path)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.eos_token_ids = LlamaConfig.load(model_path).eos_token_ids
        self.vocab_size = self._tokenizer.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; the names of special tokens in it become those tokens.

        Args:
            add_special_tokens: whether the tokenizer adds its BOS and the like. True for plain completions;
                False for a rendered chat template, which writes them itself.
        """
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    async def encode_async(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """`encode` in the library's own threads, without the GIL."""
        encoding = await self._tokenizer.async_encode(text, add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole answer. Bytes that are not UTF-8 become U+FFFD.

        Nothing is stripped at the start, since an answer continues its prompt.
        """
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        pieces = [self.token_bytes(token_id) for token_id in token_ids if token_id not in skipped]
        return b"".join(pieces).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, not always whole characters; none for ids that only pad the vocabulary."""
        added = self._added.get(token_id)
        if added is not None:
            return added
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else self._to_bytes(token)


def _token_to_bytes(decoder: dict[str, Any] | None, path: Path) -> Callable[[str], bytes]:
    """How this tokenizer writes bytes into its vocabulary: GPT-2's alphabet or SentencePiece's marks."""
    steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return _byte_level
    if kinds and kinds <= _SENTENCEPIECE_DECODERS:
        return _sentencepiece
    raise ConfigError(f"{path}: decoder {sorted(kinds) or None} is neither ByteLevel nor SentencePiece")


def _gpt2_alphabet() -> dict[str, int]:
    """Character → byte: printable Latin-1 stands for itself, the other bytes for U+0100 and up (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_GPT2_ALPHABET = _gpt2_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_GPT2_ALPHABET[character] for character in token)
    except KeyError:  # not written in the alphabet: a token added as plain text
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace(_WORD_START, " ").encode()
