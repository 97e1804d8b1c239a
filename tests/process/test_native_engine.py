"""The native engine with a real runner process over the tiny model."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from prfaas.engine.interface import ChunkPlan, SequenceEvent, SequenceRequest
from prfaas.engine.model_config import LlamaConfig
from prfaas.engine.native import NativeEngine
from prfaas.engine.runner import ModelRunner
from prfaas.engine.step import SequenceStep, StepPlan
from prfaas.errors import EngineFailure
from prfaas.kv.layout import KVLayout
from prfaas.protocol.messages import Sampling

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

PAGE = 16
MakeEngine = Callable[..., Awaitable[NativeEngine]]


def layout_for(model_path: Path, pages: int) -> KVLayout:
    groups = LlamaConfig.load(model_path).cache_groups
    return KVLayout(groups=groups, page_size=PAGE, dtype="float32", num_pages=pages)


def new_engine(model_path: Path, log_path: Path, pages: int = 128, **options: Any) -> NativeEngine:
    options = {"chunk_tokens": 32, "max_running": 4, **options}
    return NativeEngine(model_path, layout_for(model_path, pages), log_path=log_path, **options)


async def stop_and_check(engine: NativeEngine) -> None:
    """The runner is gone and every page accounted for."""
    pid = runner_pid(engine)
    await engine.stop()
    assert not is_alive(pid), "the runner outlived its engine"
    engine.pool.check()
    assert engine.pool.total_pins == 0


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared_engine(
    tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[NativeEngine]:
    engine = new_engine(tiny_model_path, tmp_path_factory.mktemp("engine") / "runner.log")
    await engine.start()
    yield engine
    await stop_and_check(engine)


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared_engine: NativeEngine) -> AsyncIterator[NativeEngine]:
    """An engine that the test leaves idle and in order; its prefix cache remembers earlier tests."""
    yield shared_engine
    assert shared_engine.pool.total_pins == 0
    shared_engine.pool.check()
    assert shared_engine.failure is None
    shared_engine.on_chunk = lambda chunk: None


@pytest_asyncio.fixture(loop_scope="module")
async def make_engine(tiny_model_path: Path, tmp_path: Path) -> AsyncIterator[MakeEngine]:
    """Makes started engines for tests that break them or need special ones."""
    engines: list[NativeEngine] = []

    async def make(**options: Any) -> NativeEngine:
        engines.append(new_engine(tiny_model_path, tmp_path / "runner.log", **options))
        await engines[-1].start()
        return engines[-1]

    yield make
    for engine in engines:
        await stop_and_check(engine)


def runner_pid(engine: NativeEngine) -> int:
    assert engine._link is not None
    assert engine._link.process is not None
    return engine._link.process.pid


def is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def is_running(pid: int) -> bool:
    """Alive and not a zombie that its new parent has not collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Listener:
    """Collects one sequence's events; `ended` is set by the last one."""

    def __init__(self) -> None:
        self.events: list[SequenceEvent] = []
        self.ended = asyncio.Event()
        self.first = asyncio.Event()

    def __call__(self, event: SequenceEvent) -> None:
        self.events.append(event)
        if event.token_ids:
            self.first.set()
        if event.finish_reason is not None:
            self.ended.set()

    @property
    def tokens(self) -> list[int]:
        return [t for event in self.events for t in event.token_ids]

    async def reason(self) -> str | None:
        await asyncio.wait_for(self.ended.wait(), 30)
        return self.events[-1].finish_reason


def submit(engine: NativeEngine, name: str, prompt: list[int], n: int | None, **sampling: object) -> Listener:
    match = engine.pool.match(prompt, max_tokens=len(prompt) - 1)
    listener = Listener()
    asks = None if n is None else Sampling(max_tokens=n, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    engine.submit(
        SequenceRequest(
            sequence_id=name,
            token_ids=prompt,
            page_ids=match.page_ids,
            computed_tokens=match.tokens,
            sampling=asks,
        ),
        listener,
    )
    return listener


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(7 * i + 31 * seed + i * i) % 290 + 3 for i in range(length)]


def plain_loop(model_path: Path, prompt: list[int], n: int) -> list[int]:
    """Whole prefill in one step, then token by token, with no scheduler, cache or second process."""
    layout = layout_for(model_path, layout_pages := (len(prompt) + n) // PAGE + 1)
    runner = ModelRunner(
        model_path,
        layout,
        bytearray(layout.pool_bytes),
        device="cpu",
        dtype="float32",
        threads=1,
        on_layer=lambda: None,
    )
    pages = list(range(layout_pages))
    tokens = list(prompt)
    if prompt[1:]:
        runner.execute(StepPlan(0, [SequenceStep(tokens[:-1], 0, pages, None)]))
    for step in range(1, n + 1):
        last = SequenceStep(tokens[-1:], len(tokens) - 1, pages, Sampling(max_tokens=n))
        tokens += runner.execute(StepPlan(step, [last])).token_ids
    return tokens[len(prompt) :]


async def test_the_engine_generates_what_a_plain_loop_does(
    engine: NativeEngine, tiny_model_path: Path
) -> None:
    prompts = [prompt_of(n, 100 + n) for n in (1, 2, 40, 75)]
    listeners = [submit(engine, f"s{i}", prompt, 20) for i, prompt in enumerate(prompts)]
    assert [await listener.reason() for listener in listeners] == ["length"] * 4
    for listener, prompt in zip(listeners, prompts, strict=True):
        assert listener.tokens == plain_loop(tiny_model_path, prompt, 20)


async def test_a_cached_prefix_answers_the_same_and_is_not_computed_again(engine: NativeEngine) -> None:
    start = engine.load().prefill_tokens_total
    cold = submit(engine, "cold", prompt_of(70, 11), 20)
    await cold.reason()
    before = engine.load().prefill_tokens_total
    warm = submit(engine, "warm", prompt_of(70, 11), 20)
    await warm.reason()
    assert warm.tokens == cold.tokens
    assert before - start == 69
    assert engine.load().prefill_tokens_total - before == 69 - 4 * PAGE


async def test_preemption_in_a_tiny_pool_changes_no_token(
    make_engine: MakeEngine, tiny_model_path: Path
) -> None:
    engine = await make_engine(pages=8)
    prompts = [prompt_of(30, seed) for seed in range(3)]
    listeners = [submit(engine, f"s{i}", prompt, 60) for i, prompt in enumerate(prompts)]
    for listener, prompt in zip(listeners, prompts, strict=True):
        assert await listener.reason() == "length"
        assert listener.tokens == plain_loop(tiny_model_path, prompt, 60)
    assert engine.load().prefill_tokens_total > 3 * 29, "nothing was preempted, so nothing was tested"


async def test_sampling_with_a_seed_does_not_depend_on_the_batch(engine: NativeEngine) -> None:
    alone = submit(engine, "alone", prompt_of(20, 12), 20, temperature=1.0, seed=5)
    await alone.reason()
    together = [
        submit(engine, f"s{i}", prompt_of(20, 12), 20, temperature=1.0, seed=seed)
        for i, seed in enumerate((5, 6))
    ]
    for listener in together:
        await listener.reason()
    assert together[0].tokens == alone.tokens
    assert together[1].tokens != alone.tokens


async def test_layers_are_counted_and_chunks_announced_before_they_run(engine: NativeEngine) -> None:
    announced: list[tuple[ChunkPlan, int]] = []
    engine.on_chunk = lambda chunk: announced.append((chunk, engine.layer_counter.value()))
    start = engine.layer_counter.value()
    listener = submit(engine, "a", prompt_of(70, 13), None)
    assert await listener.reason() == "prefilled"
    layers = engine.layout.num_layers
    assert [(c.start_token, c.end_token, c.last) for c, _ in announced] == [
        (0, 32, False),
        (32, 64, False),
        (64, 69, True),
    ]
    assert [value - start for _, value in announced] == [0, layers, 2 * layers]
    assert [c.layers_done_before for c, _ in announced] == [value for _, value in announced]
    assert engine.layer_counter.value() - start == 3 * layers
    pages = listener.events[-1].page_ids
    view = engine.buffer.array.view("float32").reshape(layers, engine.layout.num_pages, -1)
    assert all(view[layer, page].any() for layer in range(layers) for page in pages), "KV is in shared memory"
    engine.pool.release(pages)


async def test_a_failing_announcement_ends_that_sequence_only(engine: NativeEngine) -> None:

    def refuse(chunk: ChunkPlan) -> None:
        if chunk.sequence_id == "bad":
            raise OSError("no route")

    engine.on_chunk = refuse
    bad, good = submit(engine, "bad", prompt_of(20, 14), 5), submit(engine, "good", prompt_of(20, 1), 5)
    assert (await bad.reason(), await good.reason()) == ("error", "length")
    assert "no route" in bad.events[-1].error


async def test_a_listener_that_raises_hurts_nobody_else(engine: NativeEngine) -> None:

    def raising(_: SequenceEvent) -> None:
        raise RuntimeError("listener")

    request = SequenceRequest(
        sequence_id="bad", token_ids=[5, 6], page_ids=[], computed_tokens=0, sampling=Sampling(max_tokens=3)
    )
    engine.submit(request, raising)
    good = submit(engine, "good", prompt_of(20, 15), 5)
    assert await good.reason() == "length"


async def test_cancel_frees_everything(engine: NativeEngine) -> None:
    listeners = [submit(engine, f"s{i}", prompt_of(60, 50 + i), 500) for i in range(6)]
    await asyncio.wait_for(listeners[0].first.wait(), 30)
    for i in range(6):
        engine.cancel(f"s{i}")
    assert [await listener.reason() for listener in listeners] == ["cancelled"] * 6
    assert engine.pool.total_pins == 0
    load = engine.load()
    assert (load.waiting, load.running, load.waiting_prefill_tokens) == (0, 0, 0)


async def test_a_step_that_fails_in_the_runner_ends_its_sequence_and_the_engine_goes_on(
    engine: NativeEngine,
) -> None:
    bad = submit(engine, "bad", [5, 100_000, 6], 5)
    assert await bad.reason() == "error"
    assert "vocabulary" in bad.events[-1].error
    good = submit(engine, "good", prompt_of(20, 17), 5)
    assert await good.reason() == "length"
    assert engine.failure is None


async def test_a_killed_runner_ends_every_sequence_and_is_reported(make_engine: MakeEngine) -> None:
    engine = await make_engine()
    failures: list[EngineFailure] = []
    engine.on_failure = failures.append
    listeners = [submit(engine, f"s{i}", prompt_of(60, i), 1500) for i in range(3)]
    await asyncio.wait_for(listeners[0].first.wait(), 30)
    os.kill(runner_pid(engine), signal.SIGKILL)
    assert [await listener.reason() for listener in listeners] == ["error"] * 3
    assert failures == [engine.failure]
    assert engine.pool.total_pins == 0
    late = submit(engine, "late", prompt_of(5), 5)
    assert await late.reason() == "error"
    assert "engine has failed" in late.events[-1].error


async def test_a_runner_killed_while_idle_is_noticed(make_engine: MakeEngine) -> None:
    engine = await make_engine()
    failed = asyncio.Event()
    engine.on_failure = lambda _: failed.set()
    os.kill(runner_pid(engine), signal.SIGKILL)
    await asyncio.wait_for(failed.wait(), 30)


async def test_a_stopped_runner_is_killed_at_the_step_deadline(make_engine: MakeEngine) -> None:
    engine = await make_engine(step_deadline_s=0.5)
    listener = submit(engine, "a", prompt_of(60), 1500)
    await asyncio.wait_for(listener.first.wait(), 30)
    os.kill(runner_pid(engine), signal.SIGSTOP)
    assert await listener.reason() == "error"
    assert "silent for 0.5 s" in listener.events[-1].error
    assert not is_alive(runner_pid(engine))


async def test_stopping_the_engine_cancels_what_runs(make_engine: MakeEngine) -> None:
    engine = await make_engine()
    listeners = [submit(engine, f"s{i}", prompt_of(60, i), 1500) for i in range(6)]
    await asyncio.wait_for(listeners[0].first.wait(), 30)
    await engine.stop()
    assert [await listener.reason() for listener in listeners] == ["cancelled"] * 6
    with pytest.raises(EngineFailure, match="stopped"):
        submit(engine, "late", prompt_of(5), 5)


async def test_signals_to_the_process_group_leave_the_runner_to_its_parent(engine: NativeEngine) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(runner_pid(engine), number)
    assert await submit(engine, "a", prompt_of(20, 18), 5).reason() == "length"


PARENT = """
import asyncio, sys
from pathlib import Path
from test_native_engine import new_engine, runner_pid

async def main():
    engine = new_engine(Path(sys.argv[1]), Path(sys.argv[2]))
    await engine.start()
    print(runner_pid(engine), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_a_killed_parent_leaves_no_runner(tiny_model_path: Path, tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT, str(tiny_model_path), str(tmp_path / "runner.log")),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    assert parent.stdout is not None
    pid = int(await asyncio.wait_for(parent.stdout.readline(), 60))
    assert is_alive(pid)
    parent.kill()
    await parent.communicate()
    async with asyncio.timeout(10):
        while is_running(pid):  # noqa: ASYNC110 - nothing announces the death of a stranger
            await asyncio.sleep(0.02)


async def test_a_model_that_does_not_load_is_reported_with_the_runners_last_words(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    layout = layout_for(tiny_model_path, 8)
    engine = NativeEngine(tiny_model_path, layout, device="tpu", log_path=tmp_path / "runner.log")
    with pytest.raises(EngineFailure, match=r"(?s)its last words:.*device 'tpu'"):
        await engine.start()
    await engine.stop()


async def test_an_idle_engine_uses_no_cpu(engine: NativeEngine) -> None:
    await submit(engine, "a", prompt_of(20, 19), 5).reason()
    await asyncio.sleep(0.5)
    pid = runner_pid(engine)

    def cpu_s() -> float:
        user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK") + time.process_time()

    before = cpu_s()
    await asyncio.sleep(1.0)
    assert cpu_s() - before < 0.05


async def test_calibration_gives_a_usable_profile_and_leaves_no_page_behind(engine: NativeEngine) -> None:
    profile = await asyncio.wait_for(engine.calibrate([0, 256, 700], [1, 2, 4]), 60)
    assert profile.chunk_tokens == 32
    assert profile.prefill_base_s + 32 * profile.prefill_token_s > 0
    assert profile.decode_base_s + profile.decode_sequence_s > 0
    assert engine.pool.available == engine.layout.num_pages
    busy = submit(engine, "busy", prompt_of(60, 20), 1500)
    await asyncio.wait_for(busy.first.wait(), 30)
    with pytest.raises(RuntimeError, match="idle engine"):
        await engine.calibrate([0], [1])
    engine.cancel("busy")
    assert await busy.reason() == "cancelled"
