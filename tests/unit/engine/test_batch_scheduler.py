"""The batch scheduler: what goes into a step, how sequences end, and what happens when pages run out."""

from __future__ import annotations

import pytest
from paged_fake import PagedFake, generate

from prfaas.engine.interface import ChunkPlan, SequenceEvent, SequenceRequest
from prfaas.engine.scheduler import BatchScheduler, PlannedStep
from prfaas.engine.step import StepResult
from prfaas.errors import EngineFailure
from prfaas.kv.pool import PagePool
from prfaas.protocol.messages import Sampling

PAGE = 4
LAYERS = 3


class Bench:
    """A scheduler with a fake runner; `events` collects what the host would hear."""

    def __init__(self, pages: int = 64, eos: int = -1, **options: int) -> None:
        self.pool = PagePool(pages, PAGE)
        self.runner = PagedFake(PAGE)
        settings = {"chunk_tokens": 16, "max_running": 4, "context_length": 1000, **options}
        self.scheduler = BatchScheduler(self.pool, eos_token_ids=frozenset([eos]), **settings)
        self.layers = 0
        self.events: list[SequenceEvent] = []
        self.chunks: list[ChunkPlan] = []

    def submit(
        self, name: str, prompt: list[int], max_tokens: int | None = 3, salt: str = "", **sampling: object
    ) -> None:
        match = self.pool.match(prompt, salt, max_tokens=len(prompt) - 1)
        self.scheduler.submit(
            SequenceRequest(
                sequence_id=name,
                token_ids=prompt,
                page_ids=match.page_ids,
                computed_tokens=match.tokens,
                cache_salt=salt,
                sampling=None if max_tokens is None else Sampling(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
            )
        )

    def plan(self) -> PlannedStep | None:
        step = self.scheduler.plan(self.layers)
        self.drain()
        return step

    def step(self) -> PlannedStep | None:
        step = self.plan()
        if step is not None:
            self.chunks += step.chunks
            self.scheduler.finish(self.runner.execute(step.plan))
            self.layers += LAYERS
            self.drain()
        return step

    def run(self, steps: int = 1000) -> None:
        for _ in range(steps):
            if self.step() is None:
                return

    def drain(self) -> None:
        self.events += self.scheduler.take_events()
        self.pool.check()

    def tokens(self, name: str) -> list[int]:
        return [t for event in self.events if event.sequence_id == name for t in event.token_ids]

    def ends(self, name: str) -> list[str]:
        return [e.finish_reason for e in self.events if e.sequence_id == name and e.finish_reason]

    def spans(self, name: str) -> list[tuple[int, int]]:
        return [(c.start_token, c.end_token) for c in self.chunks if c.sequence_id == name]


def prompt(n: int, first: int = 100) -> list[int]:
    return list(range(first, first + n))


# ---------------------------------------------------------------- planning


def test_prefill_covers_all_but_the_last_token_which_decode_runs_in_the_next_step() -> None:
    bench = Bench()
    bench.submit("a", prompt(10))
    first, second = bench.step(), bench.step()
    assert first is not None
    assert second is not None
    assert [s.token_ids for s in first.plan.sequences] == [prompt(10)[:9]]
    assert first.plan.sequences[0].sampling is None
    assert [(s.token_ids, s.start) for s in second.plan.sequences] == [([prompt(10)[9]], 9)]
    assert second.plan.sequences[0].sampling is not None


def test_a_prompt_whose_kv_is_there_decodes_at_once() -> None:
    bench = Bench()
    bench.submit("first", prompt(9))
    bench.run()
    bench.submit("again", prompt(9))
    step = bench.step()
    assert step is not None
    assert step.chunks == []
    assert step.plan.sequences[0].start == 8
    bench.run()
    assert bench.tokens("again") == bench.tokens("first") == generate(prompt(9), 3)


def test_one_step_mixes_every_decode_with_prefill_chunks() -> None:
    bench = Bench()
    bench.submit("a", prompt(5), max_tokens=50)
    bench.submit("b", prompt(5, 200), max_tokens=50)
    bench.step()
    bench.submit("c", prompt(40, 300))
    step = bench.step()
    assert step is not None
    assert [s.sampling is not None for s in step.plan.sequences] == [True, True, False]
    assert [(c.sequence_id, c.start_token, c.end_token) for c in step.chunks] == [("c", 0, 16)]


def test_chunks_are_first_come_first_served_and_short_ones_share_a_step() -> None:
    bench = Bench()
    bench.submit("long", prompt(23))
    bench.submit("short", prompt(6, 200))
    bench.submit("shorter", prompt(4, 300))
    bench.step()
    assert [c.sequence_id for c in bench.chunks] == ["long"]
    bench.step()
    assert bench.spans("long") == [(0, 16), (16, 22)]
    assert bench.spans("short") == [(0, 5)]
    assert bench.spans("shorter") == [(0, 3)]


def test_a_chunk_that_does_not_end_the_prefill_ends_with_a_page() -> None:
    bench = Bench(chunk_tokens=10)
    bench.submit("a", prompt(30))
    bench.run()
    assert bench.spans("a") == [(0, 8), (8, 16), (16, 24), (24, 29)]
    assert [c.last for c in bench.chunks] == [False, False, False, True]


def test_chunks_smaller_than_a_page_still_get_on() -> None:
    bench = Bench(chunk_tokens=3)
    bench.submit("a", prompt(8))
    bench.run()
    assert bench.spans("a") == [(0, 3), (3, 4), (4, 7)]
    assert bench.tokens("a") == generate(prompt(8), 3)


def test_chunk_plans_tell_when_their_layers_are_done_and_which_pages_they_fill() -> None:
    bench = Bench()
    bench.submit("a", prompt(33), max_tokens=None)
    bench.run()
    assert [c.layers_done_before for c in bench.chunks] == [0, LAYERS]
    assert [len(c.page_ids) for c in bench.chunks] == [4, 8]
    assert bench.events[-1].page_ids == bench.chunks[-1].page_ids


def test_no_more_than_max_running_decode_together_in_order_of_readiness() -> None:
    bench = Bench(max_running=2)
    for i in range(4):
        bench.submit(f"s{i}", prompt(3, 100 * i), max_tokens=2)
    bench.step()
    step = bench.step()
    assert step is not None
    assert len(step.plan.sequences) == 2
    assert bench.scheduler.load().waiting == 2
    bench.run()
    assert [e.sequence_id for e in bench.events if e.finish_reason] == ["s0", "s1", "s2", "s3"]


def test_planning_twice_without_a_result_is_refused() -> None:
    bench = Bench()
    bench.submit("a", prompt(3))
    bench.plan()
    with pytest.raises(RuntimeError, match="before the running step"):
        bench.plan()


# ---------------------------------------------------------------- ends


def test_a_prefill_only_sequence_hands_its_pages_to_the_host() -> None:
    bench = Bench()
    bench.submit("a", prompt(20), max_tokens=None)
    bench.run()
    (end,) = [e for e in bench.events if e.finish_reason]
    assert (end.finish_reason, end.prefilled_tokens) == ("prefilled", 19)
    assert bench.runner.read(end.page_ids, 19) == prompt(20)[:19]
    assert bench.pool.counts().pinned == 5
    bench.pool.release(end.page_ids)
    assert bench.pool.counts().pinned == 0


def test_a_prefill_only_sequence_that_is_all_cached_ends_without_a_step() -> None:
    bench = Bench()
    bench.submit("a", prompt(9), max_tokens=None)
    bench.run()
    bench.submit("b", prompt(9), max_tokens=None)
    assert bench.plan() is None
    assert bench.ends("b") == ["prefilled"]


def test_progress_is_reported_after_every_chunk() -> None:
    bench = Bench()
    bench.submit("a", prompt(40))
    bench.run()
    assert [e.prefilled_tokens for e in bench.events if e.prefilled_tokens is not None] == [16, 32, 39]


def test_length_ends_at_max_tokens_and_at_the_context_length() -> None:
    bench = Bench(context_length=12)
    bench.submit("short", prompt(5), max_tokens=2)
    bench.submit("long", prompt(5, 200), max_tokens=100)
    bench.submit("full", prompt(12, 300), max_tokens=100)
    bench.run()
    assert bench.tokens("short") == generate(prompt(5), 2)
    assert len(bench.tokens("long")) == 7
    assert len(bench.tokens("full")) == 1
    assert bench.ends("short") == bench.ends("long") == bench.ends("full") == ["length"]


def test_eos_and_stop_tokens_end_with_the_token_included() -> None:
    answer = generate(prompt(5), 10)
    bench = Bench(eos=answer[2])
    bench.submit("eos", prompt(5), max_tokens=10)
    bench.submit("stop", prompt(5), max_tokens=10, stop_token_ids=(answer[1],))
    bench.submit("ignore", prompt(5), max_tokens=10, ignore_eos=True)
    bench.run()
    assert (bench.tokens("eos"), bench.ends("eos")) == (answer[: answer.index(answer[2]) + 1], ["stop"])
    assert (bench.tokens("stop"), bench.ends("stop")) == (answer[: answer.index(answer[1]) + 1], ["stop"])
    assert (bench.tokens("ignore"), bench.ends("ignore")) == (answer, ["length"])


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "message"),
    [(1001, 1, "context length of 1000"), (300, 1, "KV pool of 64 pages"), (5, 0, "max_tokens=0")],
)
def test_what_can_never_run_ends_at_once_with_a_reason(tokens: int, max_tokens: int, message: str) -> None:
    bench = Bench()
    bench.submit("a", prompt(tokens), max_tokens=max_tokens)
    assert bench.plan() is None
    assert bench.ends("a") == ["error"]
    assert message in bench.events[-1].error
    assert bench.pool.counts().pinned == 0


def test_a_contradictory_request_is_the_callers_fault() -> None:
    bench = Bench()
    bad = SequenceRequest(sequence_id="a", token_ids=[1, 2], page_ids=[], computed_tokens=2)
    with pytest.raises(ValueError, match="the last one is decode's"):
        bench.scheduler.submit(bad)
    bad = SequenceRequest(sequence_id="a", token_ids=[1, 2], page_ids=[], computed_tokens=1)
    with pytest.raises(ValueError, match="do not fit 0 pages"):
        bench.scheduler.submit(bad)
    bench.submit("a", prompt(3))
    with pytest.raises(ValueError, match="running already"):
        bench.submit("a", prompt(3))


# ---------------------------------------------------------------- cancel and failure


def test_a_cancelled_sequence_outside_the_step_leaves_at_once() -> None:
    bench = Bench()
    bench.submit("long", prompt(200))
    bench.submit("short", prompt(4, 500))
    bench.scheduler.cancel("long")
    bench.step()
    assert bench.ends("long") == ["cancelled"]
    assert bench.spans("short") == [(0, 3)]


def test_pages_of_a_running_step_outlive_a_cancel_until_its_result() -> None:
    bench = Bench()
    bench.submit("a", prompt(10))
    step = bench.plan()
    assert step is not None
    bench.scheduler.cancel("a")
    bench.drain()
    assert bench.ends("a") == []
    assert bench.pool.counts().pinned == 3
    bench.scheduler.finish(bench.runner.execute(step.plan))
    bench.drain()
    assert bench.ends("a") == ["cancelled"]
    assert bench.pool.counts().pinned == 0


def test_a_token_sampled_for_a_cancelled_sequence_is_dropped_and_others_keep_theirs() -> None:
    bench = Bench()
    bench.submit("a", prompt(5))
    bench.submit("b", prompt(5, 200))
    bench.step()
    step = bench.plan()
    assert step is not None
    bench.scheduler.cancel("a")
    bench.scheduler.finish(bench.runner.execute(step.plan))
    bench.run()
    assert (bench.tokens("a"), bench.ends("a")) == ([], ["cancelled"])
    assert bench.tokens("b") == generate(prompt(5, 200), 3)


def test_cancelling_the_unknown_is_ignored() -> None:
    Bench().scheduler.cancel("nobody")


def test_a_failed_step_ends_only_its_own_sequences() -> None:
    bench = Bench(max_running=1)
    bench.submit("a", prompt(3))
    bench.submit("b", prompt(3, 200))
    bench.step()
    bench.plan()
    bench.scheduler.fail_step("out of memory")
    bench.run()
    assert bench.ends("a") == ["error"]
    assert next(e.error for e in bench.events if e.finish_reason == "error") == "out of memory"
    assert bench.tokens("b") == generate(prompt(3, 200), 3)
    assert bench.pool.counts().pinned == 0


def test_a_failed_step_publishes_nothing() -> None:
    bench = Bench()
    bench.submit("a", prompt(12))
    bench.plan()
    bench.scheduler.fail_step("boom")
    assert bench.pool.snapshot() == []


def test_ending_all_frees_everything() -> None:
    bench = Bench(max_running=1)
    for i in range(3):
        bench.submit(f"s{i}", prompt(10, 100 * i))
    bench.step()
    bench.step()
    bench.plan()
    bench.scheduler.end_all("error", "runner died")
    bench.drain()
    assert [bench.ends(f"s{i}") for i in range(3)] == [["error"]] * 3
    assert bench.scheduler.idle
    assert bench.pool.counts().pinned == 0


def test_an_answer_to_another_step_is_a_failure() -> None:
    bench = Bench()
    bench.submit("a", prompt(3))
    bench.plan()
    with pytest.raises(EngineFailure, match="answered step 7 with 0 tokens, expected step 1 with 0"):
        bench.scheduler.finish(StepResult(step=7, token_ids=[], logprobs=[], elapsed_s=0.0))


# ---------------------------------------------------------------- prefix cache


def test_prompt_and_answer_pages_are_published_as_they_fill() -> None:
    bench = Bench()
    bench.submit("a", prompt(9), max_tokens=8)
    bench.step()
    assert bench.pool.match(prompt(9)).tokens == 8
    bench.run()
    whole = prompt(9) + bench.tokens("a")
    assert bench.pool.match(whole).tokens == 16, "the last token's KV is never computed"


def test_salts_are_kept_apart() -> None:
    bench = Bench()
    bench.submit("a", prompt(9), salt="x")
    bench.run()
    bench.submit("b", prompt(9), salt="y")
    bench.run()
    assert bench.spans("b") == [(0, 8)]


# ---------------------------------------------------------------- too few pages


def test_the_youngest_is_preempted_and_still_answers_the_same() -> None:
    bench = Bench(pages=8)
    bench.submit("old", prompt(9), max_tokens=14)
    bench.submit("young", prompt(9, 200), max_tokens=14)
    bench.run()
    assert bench.tokens("old") == generate(prompt(9), 14)
    assert bench.tokens("young") == generate(prompt(9, 200), 14)
    assert len(bench.spans("old")) == 1, "the oldest is never preempted"
    assert [e.sequence_id for e in bench.events if e.finish_reason] == ["old", "young"]
    assert bench.pool.counts().pinned == 0


def test_a_sequence_that_outgrows_the_whole_pool_ends_with_a_clear_error() -> None:
    bench = Bench(pages=4)
    bench.submit("a", prompt(9), max_tokens=100)
    bench.run()
    assert bench.tokens("a") == generate(prompt(9), 8)
    assert bench.ends("a") == ["error"]
    assert "do not fit beside older sequences in 4 pages of 4 tokens" in bench.events[-1].error


def test_a_waiting_sequence_gives_up_its_prefix_for_an_older_one() -> None:
    bench = Bench(pages=4)
    bench.submit("seed", prompt(9, 200), max_tokens=1)
    bench.run()
    bench.submit("old", prompt(15), max_tokens=1)
    bench.submit("young", prompt(12, 200), max_tokens=1)
    bench.run()
    assert bench.tokens("old") == generate(prompt(15), 1)
    assert bench.tokens("young") == generate(prompt(12, 200), 1)


def test_prefill_waits_while_the_host_holds_pages_and_goes_on_when_they_return() -> None:
    bench = Bench(pages=4)
    held = bench.pool.allocate(3)
    bench.submit("a", prompt(13))
    assert bench.plan() is None
    assert bench.ends("a") == []
    bench.pool.quarantine(held[:2])
    bench.pool.release(held[2:])
    assert bench.plan() is None
    bench.pool.unquarantine(held[:2])
    bench.run()
    assert bench.tokens("a") == generate(prompt(13), 3)


def test_prefill_only_sequences_that_block_each_other_end_the_youngest() -> None:
    bench = Bench(pages=4)
    for first in (100, 200):
        bench.submit(f"seed{first}", prompt(9, first), max_tokens=None)
        bench.run()
        bench.pool.release(bench.events[-1].page_ids)
    bench.submit("old", prompt(16), max_tokens=None)
    bench.submit("young", prompt(16, 200), max_tokens=None)
    bench.run()
    assert bench.ends("young") == ["error"]
    assert bench.ends("old") == ["prefilled"]


def test_a_one_token_prompt_in_a_full_pool_waits_for_its_turn() -> None:
    bench = Bench(pages=2)
    bench.submit("old", prompt(5), max_tokens=3)
    bench.submit("young", [7], max_tokens=2)
    bench.run()
    assert bench.tokens("old") == generate(prompt(5), 3)
    assert bench.tokens("young") == generate([7], 2)


def test_load_counts_queue_and_totals() -> None:
    bench = Bench()
    bench.submit("a", prompt(33), max_tokens=2)
    bench.submit("b", prompt(9, 200), max_tokens=2)
    bench.step()
    load = bench.scheduler.load()
    assert (load.waiting, load.running, load.waiting_prefill_tokens) == (1, 1, 16 + 8)
    bench.run()
    load = bench.scheduler.load()
    assert (load.waiting, load.running, load.waiting_prefill_tokens, load.running_context_tokens) == (
        0,
        0,
        0,
        0,
    )
    assert (load.prefill_tokens_total, load.decode_tokens_total) == (40, 4)
