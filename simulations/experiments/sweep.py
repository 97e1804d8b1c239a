"""Many independent runs over the cores of a machine or a Ray cluster, with the same results everywhere.

Work comes as chains: the next task of a chain may depend on the results of the ones before it (a bisection),
and chains know nothing of each other. So results depend on the chains alone, never on who ran what when.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from simulations.experiments.backends import Backend, make_backend
from simulations.experiments.context import Context
from simulations.workload.trace import Trace

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Swept(Generic[Result]):
    results: list[list[Result]]
    """By chain, in order of its tasks."""
    interrupted: bool
    """Ctrl-C: chains may lack their last tasks."""


def run_chains(
    work: Callable[[Context, Task], Result | None],
    chains: Sequence[Callable[[list[Result]], Task | None]],
    traces: Mapping[str, Trace],
    *,
    jobs: int = 1,
    ray: str = "",
    on_result: Callable[[int, Result], None] | None = None,
) -> Swept[Result]:
    """Run every chain to its end.

    Args:
        work: a function of a module (it travels by name); gets the traces and one task. It should look at
            `Context.stopped` now and then, and may return None when it was stopped.
        chains: each is asked for its next task with the results of its former ones; None ends it.
        traces: what tasks may ask `Context.trace` for; each process gets them once.
        jobs: processes; 1 = in this one.
        ray: address of a Ray cluster, or `local` to start one of `jobs` CPUs here; empty = no Ray.
        on_result: told (chain, result) in the order in which results come in.

    Raises:
        ConfigError: Ray was asked for and is not there; or what a task raised.
    """
    results: list[list[Result]] = [[] for _ in chains]
    with make_backend(work, traces, jobs=jobs, ray=ray) as backend:
        try:
            _run(chains, results, backend, on_result)
        except KeyboardInterrupt:
            return Swept(results, interrupted=True)
        return Swept(results, interrupted=False)


def run_all(
    work: Callable[[Context, Task], Result | None],
    tasks: Sequence[Task],
    traces: Mapping[str, Trace],
    **options: Any,
) -> tuple[list[Result | None], bool]:
    """(result of every task in their order, None where Ctrl-C came first; whether it came).

    Args: as for `run_chains`.
    """
    chains = [_single(task) for task in tasks]
    swept = run_chains(work, chains, traces, **options)
    return [found[0] if found else None for found in swept.results], swept.interrupted


def run_round(
    backend: Backend, tasks: Sequence[Any], on_result: Callable[[int, Any], None] | None = None
) -> list[Any]:
    """The result of every task, in their order; for work in rounds, on a backend that outlives them.

    Raises:
        KeyboardInterrupt: Ctrl-C; the backend then ends without waiting for what still runs.
    """
    results: list[list[Any]] = [[] for _ in tasks]
    _run([_single(task) for task in tasks], results, backend, on_result)
    return [found for (found,) in results]


def _single(task: Task) -> Callable[[list[Any]], Task | None]:
    return lambda results: None if results else task


def _run(
    chains: Sequence[Callable[[list[Result]], Task | None]],
    results: list[list[Result]],
    backend: Backend,
    on_result: Callable[[int, Result], None] | None,
) -> None:
    """Keeps the backend busy: chains in their order, one task of each at a time."""
    waiting = list(reversed(range(len(chains))))
    running = 0
    while waiting or running:
        while waiting and running < backend.slots:
            chain = waiting.pop()
            task = chains[chain](results[chain])
            if task is not None:
                backend.submit(chain, task)
                running += 1
        if not running:
            return
        chain, result = backend.wait()
        running -= 1
        if result is None:
            raise KeyboardInterrupt
        results[chain].append(result)
        if on_result is not None:
            on_result(chain, result)
        waiting.append(chain)
