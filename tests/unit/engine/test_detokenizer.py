"""Text streams out in whole characters, exactly as a full decode gives it, and stops before stop strings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import make_tiny_model
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models

from prfaas.engine.detokenizer import IncrementalDetokenizer, StopChecker
from prfaas.engine.tokenizer import Tokenizer
from prfaas.errors import ConfigError

TEXTS = st.text(
    alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from("éß漢字🙂👩‍👩‍👧 \n")), max_size=30
)


@pytest.fixture(scope="module")
def tokenizer(tiny_model_path: Path) -> Tokenizer:
    return Tokenizer(tiny_model_path)


@pytest.fixture(scope="module")
def hf_tokenizer(tiny_model_path: Path) -> HFTokenizer:
    return HFTokenizer.from_file(str(tiny_model_path / "tokenizer.json"))


def stream(tokenizer: Tokenizer, token_ids: list[int]) -> tuple[list[str], str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [detokenizer.add([token_id]) for token_id in token_ids], detokenizer.finish()


@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_text_comes_back_whole_and_no_piece_holds_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    pieces, rest = stream(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert "".join(pieces) == text
    assert rest == ""
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@settings(max_examples=100, deadline=None)
@given(token_ids=st.lists(st.integers(0, 299), max_size=40), cut=st.integers(0, 40))
def test_any_tokens_also_invalid_utf8_decode_as_the_library_decodes_them(
    tokenizer: Tokenizer, hf_tokenizer: HFTokenizer, token_ids: list[int], cut: int
) -> None:
    full = hf_tokenizer.decode(token_ids, skip_special_tokens=True)
    pieces, rest = stream(tokenizer, token_ids)
    assert "".join(pieces) + rest == full == tokenizer.decode(token_ids)
    halves = IncrementalDetokenizer(tokenizer)
    assert halves.add(token_ids[:cut]) + halves.add(token_ids[cut:]) + halves.finish() == full


def test_a_character_appears_with_the_token_that_completes_it(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("🙂é", add_special_tokens=False)
    assert stream(tokenizer, token_ids) == (["", "", "", "🙂", "", "é"], "")
    assert stream(tokenizer, token_ids[:-1]) == (["", "", "", "🙂", ""], "\ufffd")


def test_special_tokens_are_left_out_unless_asked_for(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("a<|im_end|>b", add_special_tokens=False)
    assert stream(tokenizer, token_ids) == (["a", "", "b"], "")
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    assert detokenizer.add(token_ids) == "a<|im_end|>b"


def test_ids_that_only_pad_the_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer, [tokenizer.vocab_size + 5]) == ([""], "")


async def test_async_encoding_equals_encoding(tokenizer: Tokenizer) -> None:
    text = "The weather in Tórshavn 🙂 " * 50
    assert await tokenizer.encode_async(text, add_special_tokens=True) == tokenizer.encode(
        text, add_special_tokens=True
    )


def sentencepiece_model(path: Path) -> Tokenizer:
    """A tokenizer with byte fallback and SentencePiece's word marks, like Llama 2's."""
    make_tiny_model(path)
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁hello", "▁", "world", "é"]
    vocab = {token: i for i, token in enumerate(tokens)}
    hf_tokenizer = HFTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    hf_tokenizer.decoder = decoders.Sequence(steps)
    hf_tokenizer.save(str(path / "tokenizer.json"))
    return Tokenizer(path)


def test_byte_fallback_tokens_join_into_characters(tmp_path: Path) -> None:
    tokenizer = sentencepiece_model(tmp_path / "model")
    euro = [1 + byte for byte in "€".encode()]
    assert stream(tokenizer, [257, *euro, 258, 259, 260]) == ([" hello", "", "", "€", " ", "world", "é"], "")


def test_a_decoder_of_unknown_kind_is_refused_by_name(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model") / "tokenizer.json"
    content = json.loads(path.read_text())
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="WordPiece"):
        Tokenizer(path.parent)


def test_a_missing_tokenizer_is_refused_by_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


# ---------------------------------------------------------------- stop strings

STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3)
PIECES = st.lists(st.text(alphabet="abc", max_size=4), max_size=12)


def cut_at_first_end(text: str, stops: list[str]) -> str:
    """The slow definition: the shortest prefix that ends with a stop string, without the longest such."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


@settings(max_examples=300, deadline=None)
@given(stops=STOPS, pieces=PIECES)
def test_text_is_cut_before_the_first_stop_string_however_it_arrives(
    stops: list[str], pieces: list[str]
) -> None:
    checker = StopChecker(stops)
    shown = "".join(checker.add(piece) for piece in pieces)
    text = "".join(pieces)
    if checker.stopped:
        assert any(stop in text for stop in stops)
        assert checker.add("more") == checker.finish() == ""
    else:
        assert not any(stop in text for stop in stops)
        shown += checker.finish()
    assert shown == cut_at_first_end(text, stops)


@settings(max_examples=200, deadline=None)
@given(stops=STOPS, pieces=PIECES)
def test_only_what_may_be_the_start_of_a_stop_string_is_held_back(
    stops: list[str], pieces: list[str]
) -> None:
    checker = StopChecker(stops)
    shown = "".join(checker.add(piece) for piece in pieces)
    if not checker.stopped:
        text = "".join(pieces)
        starts = [
            stop[:length] for stop in stops for length in range(1, len(stop)) if text.endswith(stop[:length])
        ]
        assert text == shown + max(starts, key=len, default="")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopChecker(["a", ""])
