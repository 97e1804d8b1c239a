"""Checksum mode at the decode worker: a page that changed on the way fails its attempt, unserved."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from decode_service.generate import Generation
from decode_service.grants import LiveGrant
from prfaas.engine.interface import SequenceEvent, SequenceRequest
from prfaas.kv.layout import CacheGroup, KVLayout
from prfaas.kv.pool import PagePool
from prfaas.protocol.messages import (
    Failed,
    Finished,
    GenerateFrame,
    GenerateRequest,
    Grant,
    GrantFinished,
    PrefillReport,
    PrefillSite,
    Sampling,
)
from prfaas.transfer.checksums import page_checksums
from prfaas.worker.page_queue import PageQueue

GROUP = CacheGroup(kind="full", layers=(0, 1, 2), kv_heads=2, head_dim=8)
LAYOUT = KVLayout(groups=(GROUP,), page_size=4, dtype="float32", num_pages=8)
PROMPT = list(range(10))  # three pages
SITE = PrefillSite(worker="remote-0", url="http://127.0.0.1:1", cluster="far")
REPORT = PrefillReport(
    site="remote-0", cached_tokens=0, decode_cached_tokens=0, computed_tokens=9, queue_s=0.0, prefill_s=0.1,
    ready_s=0.0,
)  # fmt: skip


class Receiver:
    """A decode worker's pool, an engine that answers one token, and a sender whose pages come at once.

    Args:
        arrives: what becomes of the checksums and the bytes on the way.
    """

    def __init__(self, arrives: Callable[[Receiver, Grant, list[int]], list[int]]) -> None:
        self.pool = PagePool(LAYOUT.num_pages, LAYOUT.page_size)
        self.bytes = np.random.default_rng(5).integers(0, 256, LAYOUT.pool_bytes, dtype=np.uint8)
        self.corrupt_pages = 0
        self.frames: list[GenerateFrame] = []
        self.layout = LAYOUT
        self._arrives = arrives

    async def run(self) -> str:
        timeouts = SimpleNamespace(lease=3.0, silence=1.5)
        ignored = SimpleNamespace(observe=lambda value: None)
        metrics = SimpleNamespace(
            corrupt_pages=SimpleNamespace(inc=self._count), ready_s=ignored, cached_tokens=ignored,
            output_tokens=ignored,
        )  # fmt: skip
        host = SimpleNamespace(
            name="decode-0", pool=self.pool, engine=self, buffer=SimpleNamespace(array=self.bytes),
            spec=SimpleNamespace(checksum_pages=True), config=SimpleNamespace(timeouts=timeouts),
            metrics=metrics, chunk_watchers={},
        )  # fmt: skip
        text = SimpleNamespace(completion_tokens=1, push=lambda event: (None, event.finish_reason))
        request = GenerateRequest(
            request_id="r", attempt=1, token_ids=PROMPT, sampling=Sampling(max_tokens=1), prefill=SITE,
            deadline_s=60.0,
        )  # fmt: skip
        generation = Generation(
            cast("Any", host), cast("Any", self), PageQueue(self.pool), request, cast("Any", text)
        )
        return await generation.run(self._emit)

    def match(self) -> int:
        """Tokens of the prompt that the prefix cache would serve now."""
        match = self.pool.match(PROMPT)
        self.pool.release(match.page_ids)
        return match.tokens

    async def _emit(self, frame: GenerateFrame) -> None:
        self.frames.append(frame)

    def _count(self, pages: int) -> None:
        self.corrupt_pages += pages

    # The messenger, and its session

    async def session(self, site: PrefillSite) -> Receiver:
        return self

    def grant(self, live: LiveGrant, grant: Grant) -> None:
        sums = self._arrives(self, grant, page_checksums(self.bytes, LAYOUT, grant.page_ids))
        live.completed()
        live.finished(GrantFinished(request_id="r", attempt=1, report=REPORT, checksums=sums))

    # The engine

    def submit(self, request: SequenceRequest, on_event: Callable[[SequenceEvent], None]) -> None:
        self.pool.release(request.page_ids)
        on_event(SequenceEvent(sequence_id=request.sequence_id, token_ids=[5], finish_reason="length"))

    def cancel(self, sequence_id: str) -> None:
        raise AssertionError("nothing is running")


def intact(receiver: Receiver, grant: Grant, sums: list[int]) -> list[int]:
    return sums


def flipped(receiver: Receiver, grant: Grant, sums: list[int]) -> list[int]:
    """One bit of the last page of layer 1."""
    pages = receiver.bytes.reshape(LAYOUT.num_layers, LAYOUT.num_pages, LAYOUT.page_bytes)
    pages[1, grant.page_ids[-1], 3] ^= 0x10
    return sums


def without(receiver: Receiver, grant: Grant, sums: list[int]) -> list[int]:
    """A sender that is not in checksum mode."""
    return []


async def test_pages_that_came_intact_are_decoded_and_cached() -> None:
    receiver = Receiver(intact)
    assert await receiver.run() == "ok"
    assert isinstance(receiver.frames[-1], Finished)
    assert (receiver.corrupt_pages, receiver.match()) == (0, 8)


@pytest.mark.parametrize(("arrives", "pages"), [(flipped, 1), (without, 9)])
async def test_a_page_that_changed_on_the_way_is_corrupt_and_nothing_of_the_attempt_is_kept(
    arrives: Callable[[Receiver, Grant, list[int]], list[int]], pages: int
) -> None:
    receiver = Receiver(arrives)
    assert await receiver.run() == "corrupt"
    failed = receiver.frames[-1]
    assert isinstance(failed, Failed)
    assert (failed.site, failed.reason, failed.complete_tokens) == ("remote-0", "corrupt", 0)
    assert receiver.corrupt_pages == pages
    assert receiver.match() == 0
    assert receiver.pool.available == LAYOUT.num_pages
    receiver.pool.check()
