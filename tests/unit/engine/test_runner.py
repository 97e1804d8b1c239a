"""The runner executes plans, refuses those that would corrupt the pool, and reports layers as they finish."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from reference_model import Harness, part
from tiny_model import make_tiny_model

from prfaas.engine.model_config import LlamaConfig
from prfaas.engine.runner import ModelRunner, pool_tensor
from prfaas.engine.step import SequenceStep, StepPlan
from prfaas.errors import ConfigError
from prfaas.kv.layout import KVLayout
from prfaas.protocol.messages import Sampling

PROMPT = list(range(3, 40))


def test_each_layer_is_reported_once_its_new_kv_is_in_the_pool(tiny_model_path: Path) -> None:
    written: list[list[int]] = []

    def on_layer() -> None:
        pool = pool_tensor(harness.pool, harness.layout)
        written.append([int(pool[layer].count_nonzero()) for layer in range(2)])

    harness = Harness(tiny_model_path, on_layer=on_layer)
    harness.step(part(PROMPT, 0, range(3), None), part(PROMPT[:5], 0, [7], None))
    per_layer = (len(PROMPT) + 5) * 2 * 2 * 16
    assert written == [[per_layer, 0], [per_layer, per_layer]]


def test_only_sequences_with_sampling_get_tokens_in_plan_order(tiny_model_path: Path) -> None:
    harness = Harness(tiny_model_path)
    how = Sampling(max_tokens=1, logprobs=1)
    result = harness.step(
        part(PROMPT, 0, range(3), None), part(PROMPT[:4], 0, [5], how), part(PROMPT[:9], 0, [6])
    )
    alone = harness.step(part(PROMPT[:9], 0, [8]))
    assert len(result.token_ids) == 2
    assert result.token_ids[1:] == alone.token_ids
    assert result.logprobs[0] is not None
    assert result.logprobs[1] is None


def test_an_empty_plan_is_an_empty_result(tiny_model_path: Path) -> None:
    calls: list[None] = []
    harness = Harness(tiny_model_path, on_layer=lambda: calls.append(None))
    result = harness.runner.execute(StepPlan(step=7, sequences=[]))
    assert (result.step, result.token_ids, calls) == (7, [], [])


def test_generation_continues_from_another_workers_pages(tiny_model_path: Path) -> None:
    """What a KV transfer does: pages computed by one runner are copied to other page ids of another."""
    source, target = Harness(tiny_model_path), Harness(tiny_model_path)
    source.step(part(PROMPT, 0, [0, 1, 2], None))
    from_pages, to_pages = pool_tensor(source.pool, source.layout), pool_tensor(target.pool, target.layout)
    to_pages[:, [30, 11, 25]] = from_pages[:, [0, 1, 2]]
    ours = target.step(part([40], len(PROMPT), [30, 11, 25]))
    theirs = source.step(part([40], len(PROMPT), [0, 1, 2]))
    assert ours.token_ids == theirs.token_ids
    assert torch.equal(source.logits, target.logits)


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (part([], 0, [1]), "positions"),
        (part([1], -1, [1]), "positions"),
        (part([1], 2048, range(129)), "positions"),
        (part([300], 0, [1]), "token id"),
        (part([-1], 0, [1]), "token id"),
        (part([1] * 17, 0, [1]), "pages"),
        (part([1], 16, [1]), "pages"),
        (part([1], 0, [40]), "page id"),
        (part([1], 0, [-1]), "page id"),
    ],
)
def test_a_plan_out_of_bounds_is_refused_and_writes_nothing(
    tiny_model_path: Path, sequence: SequenceStep, message: str
) -> None:
    harness = Harness(tiny_model_path)
    with pytest.raises(ValueError, match=message):
        harness.step(part(PROMPT, 0, range(3)), sequence)
    assert not any(harness.pool)


def test_a_pool_or_layout_that_does_not_fit_the_model_is_refused(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    layout = Harness(tiny_model_path).layout

    def build(path: Path = tiny_model_path, pool: bytearray | None = None, **changes: object) -> ModelRunner:
        changed = msgspec.structs.replace(layout, **{k: v for k, v in changes.items() if k == "num_pages"})
        options = {
            "device": "cpu",
            "dtype": "float32",
            **{k: v for k, v in changes.items() if k != "num_pages"},
        }
        buffer = bytearray(layout.pool_bytes) if pool is None else pool
        return ModelRunner(path, changed, buffer, threads=1, on_layer=lambda: None, **options)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="bytes"):
        build(num_pages=41)
    with pytest.raises(ConfigError, match="bfloat16"):
        build(dtype="bfloat16")
    with pytest.raises(ConfigError, match="cuda"):
        build(device="cuda")
    with pytest.raises(ConfigError, match="groups"):
        build(make_tiny_model(tmp_path / "three", layers=3))


def test_layout_fits_the_models_cache_groups(tiny_model_path: Path) -> None:
    layout = KVLayout.fit(LlamaConfig.load(tiny_model_path).cache_groups, 16, "float32", 2**20)
    assert layout.bytes_per_token == 2 * 2 * 2 * 16 * 4


@pytest.mark.model
def test_the_real_model_knows_the_capital_of_france(real_model_path: Path) -> None:
    from prfaas.engine.chat_template import ChatTemplate
    from prfaas.engine.tokenizer import Tokenizer

    tokenizer, template = Tokenizer(real_model_path), ChatTemplate.load(real_model_path)
    assert template is not None
    prompt = template.render([{"role": "user", "content": "What is the capital of France?"}])
    inputs = tokenizer.encode(prompt, add_special_tokens=False)
    harness = Harness(real_model_path, page_size=32, num_pages=4)
    answer: list[int] = []
    start = 0
    while len(answer) < 20 and not set(answer) & set(tokenizer.eos_token_ids):
        result = harness.step(part(inputs, start, range(4)))
        start += len(inputs)
        inputs = result.token_ids
        answer += inputs
    assert tokenizer.decode(answer) == "The capital of France is Paris."
    assert answer[-1] in tokenizer.eos_token_ids
