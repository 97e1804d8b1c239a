"""The sweep runner: chains, order, and the same results on one process as on two."""

from __future__ import annotations

import os
import socket
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from prfaas.errors import ConfigError
from simulations.experiments.context import Context
from simulations.experiments.sweep import run_all, run_chains
from simulations.workload.trace import Trace

TRACE = Trace("t", np.arange(5.0), np.arange(2, 7), np.ones(5, dtype=np.int64), notes=("kept",))


def prompt_sum(context: Context, task: int) -> tuple[int, int, str, tuple[str, ...]]:
    trace = context.trace("mine")
    return task, int(trace.prompt_tokens[:task].sum()), trace.name, trace.notes


def where(context: Context, task: int) -> int:
    return os.getpid()


def fail(context: Context, task: int) -> int:
    raise ConfigError(f"task {task} is wrong")


def interrupted_at_two(context: Context, task: int) -> int | None:
    return None if task == 2 else task


def halving(start: int):
    """A chain whose every task is half of its last result."""

    def following(results: list[int]) -> int | None:
        task = results[-1][0] // 2 if results else start
        return task or None

    return following


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_come_in_the_order_of_the_tasks(jobs):
    results, interrupted = run_all(prompt_sum, [5, 1, 3, 0], {"mine": TRACE}, jobs=jobs)
    assert results == [
        (5, 20, "t", ("kept",)),
        (1, 2, "t", ("kept",)),
        (3, 9, "t", ("kept",)),
        (0, 0, "t", ("kept",)),
    ]
    assert not interrupted


def test_a_chains_tasks_follow_from_its_own_results_on_any_number_of_processes():
    starts = [5, 2, 4, 1]
    here = run_chains(prompt_sum, [halving(s) for s in starts], {"mine": TRACE}, jobs=1)
    there = run_chains(prompt_sum, [halving(s) for s in starts], {"mine": TRACE}, jobs=2)
    assert [[task for task, *_ in results] for results in here.results] == [[5, 2, 1], [2, 1], [4, 2, 1], [1]]
    assert here == there


def test_several_jobs_are_other_processes():
    pids, _ = run_all(where, list(range(4)), {}, jobs=2)
    assert os.getpid() not in pids
    assert run_all(where, [1], {}, jobs=1)[0] == [os.getpid()]


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_a_task_raises_reaches_the_caller(jobs):
    with pytest.raises(ConfigError, match="task 7 is wrong"):
        run_all(fail, [7], {}, jobs=jobs)


def test_a_stopped_task_ends_the_sweep_with_what_is_known():
    assert run_all(interrupted_at_two, [0, 1, 2, 3], {}) == ([0, 1, None, None], True)


def test_no_jobs_are_refused():
    with pytest.raises(ConfigError, match="--jobs must be 1 or more"):
        run_all(where, [1], {}, jobs=0)


def test_a_ray_cluster_that_does_not_answer_is_an_error_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConfigError, match=f"--ray 127.0.0.1:{port}: nothing answers there"):
        run_all(where, [1], {}, ray=f"127.0.0.1:{port}")
