"""Runs on several cores, with a progress bar; the results do not depend on how many."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from simulations.paper.event_driven import Job, RunJobs, Sample, run_job


@contextmanager
def runner(cores: int, total: int, console: Console, what: str) -> Iterator[RunJobs]:
    """A function that does jobs on `cores` processes and shows how many of `total` are done.

    An interrupt drops the jobs that have not begun and is raised to the caller of that function.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        with _executor(cores) as executor:

            def run_jobs(jobs: Sequence[Job]) -> list[Sample]:
                found = []
                for sample in _begin(executor, jobs) if executor else map(run_job, jobs):
                    found.append(sample)
                    progress.advance(task)
                return found

            yield run_jobs


@contextmanager
def _executor(cores: int) -> Iterator[ProcessPoolExecutor | None]:
    """None on one core: then everything runs here."""
    if cores == 1:
        yield None
        return
    spawn = multiprocessing.get_context("spawn")  # forking a process that has threads may hang
    executor = ProcessPoolExecutor(cores, mp_context=spawn)
    try:
        yield executor
    except BaseException:  # Ctrl-C above all: nobody waits for what still runs
        executor.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _begin(executor: ProcessPoolExecutor, jobs: Sequence[Job]) -> Iterator[Sample]:
    """Hand out the jobs. Processes that begin here inherit that Ctrl-C is none of their business."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return executor.map(run_job, jobs)
    finally:
        signal.signal(signal.SIGINT, handler)
