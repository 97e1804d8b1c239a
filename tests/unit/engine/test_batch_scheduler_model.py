"""Random workloads in tiny pools: every sequence ends once, with the right tokens, and no page is lost."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from paged_fake import PagedFake, generate

from prfaas.engine.interface import SequenceEvent, SequenceRequest
from prfaas.engine.scheduler import BatchScheduler
from prfaas.kv.pool import PagePool
from prfaas.protocol.messages import Sampling

CONTEXT = 40


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, object]:
    return {
        "prompt": draw(st.lists(st.integers(0, 1), min_size=1, max_size=24)),
        "max_tokens": draw(st.one_of(st.none(), st.integers(1, 12))),
        "arrives": draw(st.integers(0, 10)),
        "cancelled": draw(st.one_of(st.none(), st.none(), st.integers(0, 25))),
        "hold_steps": draw(st.integers(0, 6)),
    }


class World:
    """Host, scheduler and fake runner over one small pool; one `tick` is one step."""

    def __init__(self, pages: int, page_size: int, chunk: int, running: int) -> None:
        self.pool = PagePool(pages, page_size)
        self.runner = PagedFake(page_size)
        self.scheduler = BatchScheduler(
            self.pool,
            chunk_tokens=chunk,
            max_running=running,
            context_length=CONTEXT,
            eos_token_ids=frozenset([49]),
        )
        self.events: dict[str, list[SequenceEvent]] = {}
        self.held: list[tuple[int, list[int]]] = []

    def submit(self, name: str, job: dict) -> None:  # type: ignore[type-arg]
        prompt = job["prompt"]
        match = self.pool.match(prompt, max_tokens=len(prompt) - 1)
        assert self.runner.read(match.page_ids, match.tokens) == prompt[: match.tokens]
        sampling = None if job["max_tokens"] is None else Sampling(max_tokens=job["max_tokens"])
        self.events[name] = []
        self.scheduler.submit(
            SequenceRequest(
                sequence_id=name,
                token_ids=prompt,
                page_ids=match.page_ids,
                computed_tokens=match.tokens,
                sampling=sampling,
            )
        )

    def drain(self, now: int, all_jobs: dict[str, dict]) -> None:  # type: ignore[type-arg]
        for event in self.scheduler.take_events():
            seen = self.events[event.sequence_id]
            assert not seen or seen[-1].finish_reason is None, "an event after the end"
            seen.append(event)
            if event.finish_reason == "prefilled":
                job = all_jobs[event.sequence_id]
                length = len(job["prompt"]) - 1
                assert self.runner.read(event.page_ids, length) == job["prompt"][:length]
                self.held.append((now + job["hold_steps"], event.page_ids))
        self.pool.check()


@given(
    st.lists(jobs(), min_size=1, max_size=8),
    st.integers(3, 12),
    st.integers(1, 4),
    st.integers(1, 10),
    st.integers(1, 4),
)
@settings(deadline=None, max_examples=250)
def test_every_sequence_ends_once_and_right(
    job_list: list[dict],  # type: ignore[type-arg]
    pages: int,
    page_size: int,
    chunk: int,
    running: int,
) -> None:
    world = World(pages, page_size, chunk, running)
    all_jobs = {f"s{i}": job for i, job in enumerate(job_list)}
    for now in range(400):
        for due, page_ids in [h for h in world.held if h[0] <= now]:
            world.held.remove((due, page_ids))
            world.pool.release(page_ids)
        for name, job in all_jobs.items():
            if job["arrives"] == now:
                world.submit(name, job)
        step = world.scheduler.plan(0)
        for name, job in all_jobs.items():
            if job["cancelled"] == now:
                world.scheduler.cancel(name)
        if step is not None:
            world.scheduler.finish(world.runner.execute(step.plan))
        world.drain(now, all_jobs)
        arrived = now >= max(job["arrives"] for job in job_list)
        if step is None and arrived and not world.held:
            break
    assert world.scheduler.idle, "sequences are left although nothing can run"
    assert world.pool.counts().pinned == 0
    for name, job in all_jobs.items():
        check_answer(job, world.events[name], job_list, pages, page_size)


def check_answer(
    job: dict,  # type: ignore[type-arg]
    events: list[SequenceEvent],
    job_list: list[dict],  # type: ignore[type-arg]
    pages: int,
    page_size: int,
) -> None:
    reason = events[-1].finish_reason
    tokens = [t for event in events for t in event.token_ids]
    expected = generate(job["prompt"], len(tokens))
    assert tokens == expected, "the answer depends on how it was scheduled"
    assert reason in ("stop", "length", "prefilled", "cancelled", "error")
    if reason == "stop":
        assert tokens[-1] == 49
    if reason == "length":
        assert len(tokens) == job["max_tokens"] or len(job["prompt"]) + len(tokens) == CONTEXT
    if reason == "cancelled":
        assert job["cancelled"] is not None
    if reason == "error":
        fits = -(-(len(job["prompt"]) + len(tokens)) // page_size) <= pages
        shared_with_prefill = any(other["max_tokens"] is None for other in job_list)
        assert not fits or shared_with_prefill, "failed although it would have fitted"
