"""One attempt at the decode worker: what it reports where others fell silent, and how it is ended early."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from decode_service.generate import Generation
from decode_service.grants import LiveGrant
from prfaas.kv.layout import CacheGroup, KVLayout
from prfaas.kv.pool import PagePool
from prfaas.protocol.messages import Failed, GenerateFrame, GenerateRequest, PrefillReport, Sampling
from prfaas.transfer.events import AttemptKey

GROUP = CacheGroup(kind="full", layers=(0, 1, 2), kv_heads=2, head_dim=8)
LAYOUT = KVLayout(groups=(GROUP,), page_size=4, dtype="float32", num_pages=8)
PROMPT = list(range(10))


REQUEST = GenerateRequest(
    request_id="r", attempt=1, token_ids=PROMPT, sampling=Sampling(max_tokens=1), deadline_s=60.0
)


async def test_without_the_sender_s_last_word_the_bytes_of_all_layers_are_reported() -> None:
    pool = PagePool(LAYOUT.num_pages, LAYOUT.page_size)
    seen = SimpleNamespace(observe=lambda _: None)
    host = SimpleNamespace(
        engine=SimpleNamespace(layout=LAYOUT), metrics=SimpleNamespace(ready_s=seen, cached_tokens=seen)
    )
    generation = Generation(
        cast("Any", host), cast("Any", None), cast("Any", None), REQUEST, cast("Any", None)
    )
    live = LiveGrant(pool, AttemptKey("r", 1), "prefill-0", PROMPT, "", [], pool.allocate(3))
    live.site_cached_tokens = 4
    generation._on_last_word(None, live, 0.25)
    report = await asyncio.wait_for(generation._reporting, 5)
    assert isinstance(report, PrefillReport)
    # pages, layers, K and V, heads, tokens, values, bytes of a value
    assert report.kv_bytes == 3 * 3 * 2 * 2 * 4 * 8 * 4
    assert (report.cached_tokens, report.computed_tokens, report.ready_s) == (4, 5, 0.25)


async def test_an_attempt_that_was_failed_before_it_ran_ends_at_once() -> None:
    pool = PagePool(LAYOUT.num_pages, LAYOUT.page_size)
    engine = SimpleNamespace(layout=LAYOUT, submit=lambda request, on_event: pool.release(request.page_ids),
                             cancel=lambda sequence_id: None)  # fmt: skip
    host = SimpleNamespace(name="decode-0", pool=pool, engine=engine, chunk_watchers={})
    nothing = cast("Any", None)
    generation = Generation(cast("Any", host), nothing, nothing, REQUEST, nothing)
    frames: list[GenerateFrame] = []

    async def emit(frame: GenerateFrame) -> None:
        frames.append(frame)

    generation.fail("draining", "shutting down")
    assert await asyncio.wait_for(generation.run(emit), 5) == "draining"
    assert isinstance(frames[-1], Failed)
    assert frames[-1].reason == "draining"
    assert pool.available == LAYOUT.num_pages
