"""The forward pass computes what `transformers` computes, however its tokens are grouped into steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reference_model import Harness, part, reference_logits
from tiny_model import make_tiny_model

TOKENS = torch.randint(0, 300, (100,), generator=torch.Generator().manual_seed(7)).tolist()
SCATTERED_PAGES = (31, 4, 17, 5, 6, 38, 0)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def assert_logits_equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param({}, id="gqa-tied"),
        pytest.param({"heads": 4, "kv_heads": 4, "tied": False}, id="mha-untied"),
        pytest.param({"heads": 4, "kv_heads": 1}, id="mqa"),
        pytest.param({"head_dim": 32, "layers": 1}, id="head_dim-not-hidden-over-heads"),
        pytest.param({"attention_bias": True, "mlp_bias": True}, id="biases"),
        pytest.param({"rope_scaling": LLAMA3}, id="llama3-rope"),
        pytest.param({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, id="linear-rope"),
        pytest.param({"shards": 3, "tied": False}, id="sharded-files"),
        pytest.param(
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
            id="mistral",
        ),
        pytest.param(
            {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "qkv_bias": True}, id="qwen2"
        ),
    ],
)
def test_prefill_and_decode_logits_equal_transformers(tmp_path: Path, variant: dict[str, Any]) -> None:
    model_path = make_tiny_model(tmp_path / "model", **variant)
    theirs = reference_logits(model_path, TOKENS)
    harness = Harness(model_path)
    harness.step(part(TOKENS[:99], 0, SCATTERED_PAGES))
    assert_logits_equal(harness.logits[0], theirs[98])
    harness.step(part(TOKENS[99:], 99, SCATTERED_PAGES))
    assert_logits_equal(harness.logits[0], theirs[99])


@pytest.mark.parametrize("cuts", [(50,), (16, 32, 64), (1, 2, 3, 90), (17, 99)])
def test_prefill_in_chunks_equals_whole_prefill(tiny_model_path: Path, cuts: tuple[int, ...]) -> None:
    whole = Harness(tiny_model_path)
    whole.step(part(TOKENS, 0, range(7)))
    chunked = Harness(tiny_model_path)
    for start, end in zip((0, *cuts), (*cuts, 100), strict=True):
        chunked.step(part(TOKENS[start:end], start, SCATTERED_PAGES[: -(-end // 16)]))
    assert_logits_equal(chunked.logits, whole.logits)


def test_a_mixed_batch_gives_each_sequence_the_logits_it_has_alone(tiny_model_path: Path) -> None:
    prompts = {"prefill": TOKENS[:40], "chunk": TOKENS[10:75], "decode": TOKENS[5:38], "short": TOKENS[60:62]}
    pages = {"prefill": (1, 2, 3), "chunk": (9, 8, 20, 21, 22), "decode": (30, 4, 31), "short": (12,)}
    alone = {name: reference_logits(tiny_model_path, prompt)[-1] for name, prompt in prompts.items()}
    harness = Harness(tiny_model_path)
    harness.step(
        part(prompts["chunk"][:33], 0, pages["chunk"], None),
        part(prompts["decode"][:32], 0, pages["decode"], None),
        part(prompts["short"][:1], 0, pages["short"], None),
    )
    assert harness.logits.shape == (0, 300)
    result = harness.step(
        part(prompts["decode"][32:], 32, pages["decode"]),
        part(prompts["prefill"], 0, pages["prefill"]),
        part(prompts["short"][1:], 1, pages["short"]),
        part(prompts["chunk"][33:], 33, pages["chunk"]),
    )
    expected = torch.stack([alone[name] for name in ("decode", "prefill", "short", "chunk")])
    assert_logits_equal(harness.logits, expected)
    assert result.token_ids == expected.argmax(-1).tolist()


def test_decode_logits_do_not_depend_on_the_batch_or_on_page_numbers_by_a_single_bit(
    tiny_model_path: Path,
) -> None:
    def logits_of_first(batch: int, pages: tuple[int, ...]) -> torch.Tensor:
        harness = Harness(tiny_model_path)
        harness.step(part(TOKENS[:70], 0, pages, None))
        others = [part([i], 0, [25 + i]) for i in range(batch - 1)]
        harness.step(part(TOKENS[70:71], 70, pages), *others)
        return harness.logits[0]

    alone = logits_of_first(1, (0, 1, 2, 3, 4))
    assert torch.equal(logits_of_first(8, (0, 1, 2, 3, 4)), alone)
    assert torch.equal(logits_of_first(1, (9, 3, 14, 2, 20)), alone)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(tiny_model_path: Path, dtype: str) -> None:
    theirs = reference_logits(tiny_model_path, TOKENS)
    harness = Harness(tiny_model_path, dtype=dtype)
    harness.step(part(TOKENS[:99], 0, SCATTERED_PAGES))
    prefill = harness.logits[0]
    harness.step(part(TOKENS[99:], 99, SCATTERED_PAGES))
    for ours, reference in ((prefill, theirs[98]), (harness.logits[0], theirs[99])):
        assert torch.nn.functional.cosine_similarity(ours, reference, dim=0) > 0.999


@pytest.mark.model
def test_real_model_logits_equal_transformers(real_model_path: Path) -> None:
    tokens = [(i * 7919) % 49152 for i in range(200)]
    theirs = reference_logits(real_model_path, tokens)
    harness = Harness(real_model_path, page_size=32, num_pages=10)
    harness.step(part(tokens[:120], 0, range(10)))
    torch.testing.assert_close(harness.logits[0], theirs[119], rtol=1e-4, atol=1e-3)
    harness.step(part(tokens[120:199], 120, range(10)))
    torch.testing.assert_close(harness.logits[0], theirs[198], rtol=1e-4, atol=1e-3)
    harness.step(part(tokens[199:], 199, range(10)))
    torch.testing.assert_close(harness.logits[0], theirs[199], rtol=1e-4, atol=1e-3)
