"""Paced engines: true protocol and bytes, step times from a profile, no arithmetic."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_loop import VirtualLoop, run_virtual

from prfaas.config import PacedConfig
from prfaas.config_load import loads
from prfaas.engine.interface import ChunkPlan, SequenceEvent, SequenceRequest, StepProfile
from prfaas.engine.paced import PacedEngine, scaled_profile
from prfaas.engine.paced_runner import PacedRunner, pool_keys, step_seconds, token_marks
from prfaas.engine.step import RunnerError, SequenceStep, StepPlan, StepResult
from prfaas.errors import ConfigError
from prfaas.kv.layout import CacheGroup, KVLayout
from prfaas.kv.shared_buffer import SharedLayerCounter
from prfaas.protocol.messages import Sampling
from prfaas.units import Seconds

LAYERS, PAGE = 2, 16
PROFILE = StepProfile(64, 0.010, 0.001, 0.000_01, 0.020, 0.002, 0.000_1)
GREEDY = Sampling(max_tokens=5, ignore_eos=True)


def layout(pages: int = 64) -> KVLayout:
    group = CacheGroup(kind="full", layers=tuple(range(LAYERS)), kv_heads=2, head_dim=16)
    return KVLayout(groups=(group,), page_size=PAGE, dtype="float32", num_pages=pages)


def chunk(tokens: int, start: int, first_page: int = 0) -> SequenceStep:
    pages = list(range(first_page, first_page + -(-(start + tokens) // PAGE)))
    return SequenceStep(token_ids=[7] * tokens, start=start, page_ids=pages, sampling=None)


def decode(start: int, first_page: int = 0) -> SequenceStep:
    pages = list(range(first_page, first_page + start // PAGE + 1))
    return SequenceStep(token_ids=[9], start=start, page_ids=pages, sampling=GREEDY)


def make_runner(pages: int = 64, never: frozenset[int] = frozenset()) -> tuple[PacedRunner, Any]:
    shape = layout(pages)
    pool = np.zeros(shape.pool_bytes, dtype=np.uint8)
    runner = PacedRunner(shape, pool, SharedLayerCounter(), PROFILE, vocab_size=300, never=never)
    return runner, pool_keys(pool, shape)


# ---------------------------------------------------------------- step times


def test_a_step_takes_what_the_profile_says() -> None:
    # 32 tokens after 64: 0.010 + 32·0.001 + 32·(64 + 16)·0.00001
    assert step_seconds(PROFILE, [chunk(32, 64)]) == pytest.approx(0.0676)
    # Two sequences with 30 and 50 tokens before the new one: 0.020 + 2·0.002 + 80·0.0001
    assert step_seconds(PROFILE, [decode(30), decode(50)]) == pytest.approx(0.032)
    # Together, with the larger base alone.
    assert step_seconds(PROFILE, [decode(30), decode(50), chunk(32, 64)]) == pytest.approx(0.0896)
    assert step_seconds(PROFILE, []) == 0.0


def test_the_clock_is_scaled() -> None:
    paced = PacedConfig(prefill_token=Seconds(0.5), decode_base=Seconds(2), time_scale=3.0)
    assert scaled_profile(paced, 64) == StepProfile(64, 0.0, 1.5, 0.0, 6.0, 0.0, 0.0)


def test_layers_of_a_chunk_finish_evenly_and_the_step_ends_on_time() -> None:
    async def run() -> list[tuple[float, int]]:
        runner, _ = make_runner()
        loop, seen = asyncio.get_running_loop(), []
        step = asyncio.ensure_future(runner.execute(StepPlan(1, [chunk(40, 0)]), 1.0))
        while not step.done():
            seen.append((loop.time(), runner._counter.value()))
            await asyncio.sleep(0.001)
        await step
        seen.append((loop.time(), runner._counter.value()))
        return seen

    seen = run_virtual(run())
    duration_s = step_seconds(PROFILE, [chunk(40, 0)])
    for time_s, layers in seen:
        assert layers == pytest.approx(LAYERS * time_s / duration_s, abs=1.05)
    assert {layers for _, layers in seen} == {0, 1, 2}
    assert seen[-1][0] == pytest.approx(duration_s, abs=0.0011)


def test_late_wake_ups_do_not_add_up() -> None:
    async def run() -> float:
        runner, _ = make_runner()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        for number in range(50):
            await runner.execute(StepPlan(number, [decode(20)]), 1.0)
            loop.spend(0.004)  # a scheduler between two steps
        return loop.time()

    assert run_virtual(run()) == pytest.approx(50 * step_seconds(PROFILE, [decode(20)]), abs=0.005)


def test_a_stalled_loop_does_not_slow_the_steps_that_follow() -> None:
    async def run() -> float:
        runner, _ = make_runner()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.call_later(0.02, loop.spend, 0.05)
        for number in range(20):
            await runner.execute(StepPlan(number, [decode(20)]), 1.0)
        return loop.time()

    assert run_virtual(run()) == pytest.approx(20 * step_seconds(PROFILE, [decode(20)]))


def test_a_loop_that_stalls_for_too_long_is_late_for_good() -> None:
    async def run() -> float:
        runner, _ = make_runner()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.call_later(0.02, loop.spend, 1.0)
        for number in range(20):
            await runner.execute(StepPlan(number, [decode(20)]), 1.0)
        return loop.time()

    assert run_virtual(run()) == pytest.approx(1.02 + 19 * step_seconds(PROFILE, [decode(20)]))


def test_an_idle_engine_does_not_begin_in_the_past() -> None:
    async def run() -> float:
        runner, _ = make_runner()
        await runner.execute(StepPlan(1, [decode(20)]), 1.0)
        await asyncio.sleep(1.0)
        began_s = asyncio.get_running_loop().time()
        await runner.execute(StepPlan(2, [decode(20)]), 1.0)
        return asyncio.get_running_loop().time() - began_s

    assert run_virtual(run()) == pytest.approx(step_seconds(PROFILE, [decode(20)]))


# ---------------------------------------------------------------- bytes and tokens


@given(st.lists(st.integers(0, 299), min_size=2, max_size=60), st.data())
@settings(max_examples=30, deadline=None)
def test_kv_depends_on_tokens_and_positions_alone(tokens: list[int], data: Any) -> None:
    pages = data.draw(st.permutations(range(8)))[: -(-len(tokens) // PAGE)]
    cut = data.draw(st.integers(1, len(tokens) - 1))
    runner, keys = make_runner(pages=8)
    steps = [(0, cut), (cut, len(tokens))]
    for number, (start, end) in enumerate(steps):
        step = SequenceStep(token_ids=tokens[start:end], start=start, page_ids=pages, sampling=None)
        answer = run_virtual(runner.execute(StepPlan(number, [step]), 1.0))
        assert isinstance(answer, StepResult)
    expected = token_marks(np.array(tokens), np.arange(len(tokens)))
    for layer in range(LAYERS):
        for position in range(len(tokens)):
            slot = keys[layer, pages[position // PAGE], position % PAGE]
            mark = int(expected[position]) + layer
            assert slot[:8].tobytes() == (mark % 2**64).to_bytes(8, "little")
    untouched = [page for page in range(8) if page not in pages]
    assert not keys[:, untouched].any()


def test_marks_tell_tokens_and_positions_apart() -> None:
    tokens, positions = np.meshgrid(np.arange(300), np.arange(200))
    assert len(np.unique(token_marks(tokens.ravel(), positions.ravel()))) == 300 * 200


def test_answers_are_deterministic_and_never_end_by_themselves() -> None:
    never = frozenset(range(0, 300, 2))
    one, other = make_runner(never=never)[0], make_runner(never=never)[0]
    plan = StepPlan(1, [decode(start) for start in range(1, 100)])
    answers = [run_virtual(runner.execute(plan, 1.0)) for runner in (one, other)]
    assert isinstance(answers[0], StepResult)
    assert isinstance(answers[1], StepResult)
    assert answers[0].token_ids == answers[1].token_ids
    assert all(token % 2 for token in answers[0].token_ids)
    assert len(set(answers[0].token_ids)) > 30


@pytest.mark.parametrize(
    "step",
    [
        SequenceStep(token_ids=[1], start=16, page_ids=[0], sampling=GREEDY),
        SequenceStep(token_ids=[1] * 17, start=0, page_ids=[0, 99], sampling=None),
        SequenceStep(token_ids=[1], start=0, page_ids=[-1], sampling=GREEDY),
        SequenceStep(token_ids=[], start=0, page_ids=[0], sampling=None),
    ],
)
def test_a_plan_without_pages_for_its_tokens_is_refused_and_writes_nothing(step: SequenceStep) -> None:
    runner, keys = make_runner(pages=8)
    answer = run_virtual(runner.execute(StepPlan(1, [chunk(3, 0), step]), 1.0))
    assert isinstance(answer, RunnerError)
    assert "page" in answer.message
    assert not keys.any()


# ---------------------------------------------------------------- the engine


def run_sequences(model: Path, requests: list[list[int]], sampling: Sampling | None) -> dict[str, Any]:
    """Events and chunks of `requests` on a fresh engine."""

    async def run() -> dict[str, Any]:
        engine = PacedEngine(model, layout(), PROFILE, max_running=4)
        chunks: list[ChunkPlan] = []
        engine.on_chunk = chunks.append
        events: dict[str, list[SequenceEvent]] = {}
        ended = asyncio.Event()
        await engine.start()
        for number, tokens in enumerate(requests):
            name = str(number)
            events[name] = []

            def listen(event: SequenceEvent) -> None:
                events[event.sequence_id].append(event)
                if all(es and es[-1].finish_reason for es in events.values()):
                    ended.set()

            request = SequenceRequest(
                sequence_id=name, token_ids=tokens, page_ids=[], computed_tokens=0, sampling=sampling
            )
            engine.submit(request, listen)
        await ended.wait()
        for es in events.values():
            engine.pool.release(es[-1].page_ids)
        counts, load = engine.pool.counts(), engine.load()
        keys = pool_keys(engine.buffer.array, engine.layout).copy()
        await engine.stop()
        return {"events": events, "chunks": chunks, "counts": counts, "load": load, "keys": keys}

    return run_virtual(run())


def test_an_engine_answers_and_gives_every_page_back(tiny_model_path: Path) -> None:
    prompts = [[3 + i] * (20 + 30 * i) for i in range(3)]
    found = run_sequences(tiny_model_path, prompts, GREEDY)
    for events in found["events"].values():
        assert events[-1].finish_reason == "length"
        assert sum(len(event.token_ids) for event in events) == GREEDY.max_tokens
    assert found["counts"].pinned == 0
    assert found["load"].prefill_tokens_total == sum(len(prompt) - 1 for prompt in prompts)


def test_announced_layers_are_in_the_pages_when_the_counter_says_so(tiny_model_path: Path) -> None:
    prompt = list(range(3, 153))
    found = run_sequences(tiny_model_path, [prompt], None)
    chunks: list[ChunkPlan] = found["chunks"]
    # Chunks of 64 tokens, every layer counted once.
    assert [(c.start_token, c.end_token, c.layers_done_before) for c in chunks] == [
        (0, 64, 0), (64, 128, LAYERS), (128, 149, 2 * LAYERS),
    ]  # fmt: skip
    pages = chunks[-1].page_ids
    expected = token_marks(np.array(prompt[:-1]), np.arange(len(prompt) - 1))
    first = found["keys"][0, pages].reshape(-1, 64)[: len(expected), :8]
    assert first.tobytes() == expected.tobytes()


def test_answers_do_not_depend_on_what_runs_beside_them(tiny_model_path: Path) -> None:
    prompts = [[5] * 40, list(range(3, 90)), [250, 4, 9]]

    def answers(requests: list[list[int]]) -> list[list[int]]:
        events = run_sequences(tiny_model_path, requests, GREEDY)["events"]
        return [[t for e in events[str(i)] for t in e.token_ids] for i in range(len(requests))]

    assert answers(prompts) == [answers([prompt])[0] for prompt in prompts]


def test_calibration_reports_the_profile_itself(tiny_model_path: Path) -> None:
    async def run() -> StepProfile:
        engine = PacedEngine(tiny_model_path, layout(), PROFILE)
        await engine.start()
        try:
            return await engine.calibrate([0, 512], [1, 2])
        finally:
            await engine.stop()

    assert run_virtual(run()) == PROFILE


def test_a_paced_process_never_imports_torch() -> None:
    code = (
        "import sys, prfaas.worker.many, decode_service.service, prefill_service.service;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---------------------------------------------------------------- configuration


def tree(**paced: Any) -> str:
    worker = {"role": "decode", "engine": "paced", "paced": paced}
    return yaml.safe_dump(
        {"model": {"path": "x"}, "clusters": {"pd": {"kind": "pd", "workers": {"d": worker}}}}
    )


def test_a_paced_worker_needs_step_times() -> None:
    config = loads(tree(prefill_token="56us", decode_base="12ms", time_scale=8), {})
    _, worker = config.worker("d")
    assert worker.paced.prefill_token == pytest.approx(56e-6)
    with pytest.raises(ConfigError, match=r"workers\.d\.paced. gives no step times"):
        loads(tree(prefill_token="56us"), {})


@pytest.mark.parametrize(("field", "value"), [("decode_base", -1), ("time_scale", 0), ("time_scale", -2)])
def test_impossible_step_times_are_refused_by_name(field: str, value: float) -> None:
    fields: dict[str, Any] = {"prefill_base": 1, "decode_base": 1, field: value}
    with pytest.raises(ConfigError, match=rf"paced\.{field}"):
        loads(tree(**fields), {})
