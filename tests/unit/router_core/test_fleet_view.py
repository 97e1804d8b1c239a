"""What policies see of the fleet: live, by name or a whole column at once."""

from __future__ import annotations

import numpy as np
import pytest
from brain_fleet import fleet, info, join, request, status

from policies.base import gather
from router.core.events import WorkerLost

MAPPINGS = (
    "queued_tokens", "running", "waiting", "free_pages", "total_pages", "page_tokens", "number",
    "running_context_tokens", "max_running", "decode_base_s", "decode_sequence_s", "decode_context_s",
    "prefill_ends_s",
)  # fmt: skip


def test_it_tells_what_the_operators_view_tells() -> None:
    scheduler = fleet(2, 1, 1)
    for i in range(6):
        scheduler.place(request(f"r{i}", tokens=500 + i))
    seen = scheduler.view()
    workers = list(scheduler.workers())
    assert seen.workers == tuple(worker.name for worker in workers)
    assert sum(seen.queued_tokens.values()) > 0
    for worker in workers:
        name = worker.name
        assert (seen.cluster[name], seen.role[name], seen.ready[name]) == (worker.cluster, worker.role, True)
        assert seen.queued_tokens[name] == worker.queued_tokens
        assert seen.waiting[name] == worker.waiting
        assert seen.free_pages[name] == worker.free_pages
        backlog_s = max(0.0, seen.prefill_ends_s[name] - seen.now_s)
        assert backlog_s == pytest.approx(worker.prefill_backlog_s)
    for link in scheduler.links():
        direction = f"{link.source}->{link.target}"
        assert seen.link_bytes_per_s[direction] == link.rate_bytes_per_s
        backlog_s = max(0.0, seen.link_drains_s[direction] - seen.now_s)
        assert backlog_s == pytest.approx(link.backlog_bytes / link.rate_bytes_per_s)


def test_link_utilisation_is_what_was_booked_and_fades() -> None:
    scheduler = fleet(1, 0, 1)
    before = scheduler.view().link_utilisation["far->pd"]
    scheduler.place(request("r", tokens=4000, pair=("decode-0", "remote-0")))
    booked = scheduler.view().link_utilisation["far->pd"]
    scheduler.control(31.0)
    assert before == 0
    assert scheduler.view().link_utilisation["far->pd"] == pytest.approx(booked * np.exp(-1), rel=1e-6)


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_a_whole_column_is_what_each_name_answers(mapping: str) -> None:
    scheduler = fleet(2, 1, 1)
    scheduler.place(request())
    seen = scheduler.view()
    names = ("remote-0", "decode-1", "decode-1", "pool-0")
    values = getattr(seen, mapping)
    assert gather(values, names).tolist() == pytest.approx([values[name] for name in names])
    assert gather(values, list(names)).tolist() == gather(values, names).tolist()


def test_it_follows_workers_that_come_change_and_go() -> None:
    scheduler = fleet(1, 1, 0)
    seen, names = scheduler.view(), ("decode-0", "pool-0")
    assert gather(seen.free_pages, names).tolist() == [1000, 1000]
    # More workers than the table has columns: it is made anew.
    for index in range(20):
        join(scheduler, info(f"pool-{index + 1}", "prefill", "pd"), now_s=2.0)
    scheduler.apply(status("pool-0", "prefill", 3.0, free_pages=7))
    assert gather(scheduler.view().free_pages, names).tolist() == [1000, 7]
    assert len(scheduler.view().workers) == 22
    scheduler.apply(WorkerLost(now_s=4.0, worker="decode-0"))
    now = scheduler.view()
    assert "decode-0" not in now.workers
    assert "decode-0" not in now.cluster
    with pytest.raises(KeyError):
        now.role["decode-0"]
    with pytest.raises(KeyError):
        gather(now.free_pages, names)
    assert gather(now.free_pages, ("pool-0",)).tolist() == [7]
