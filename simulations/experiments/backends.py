"""Where tasks run: in this process, in processes of this machine, or on a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from prfaas.errors import ConfigError, PrfaasError
from simulations.experiments.context import Context, map_traces, store_traces, without_columns
from simulations.workload.trace import Trace

Work = Callable[[Context, Any], Any]
CONNECT_S = 10.0
"""How long a Ray cluster may take to accept a connection."""


class Backend(Protocol):
    slots: int
    """Tasks that it runs at once."""

    def submit(self, key: int, task: Any) -> None: ...

    def wait(self) -> tuple[int, Any]:
        """(key, result) of a task that has ended; raises what it raised."""
        ...


def make_backend(
    work: Work, traces: Mapping[str, Trace], *, jobs: int, ray: str
) -> AbstractContextManager[Backend]:
    """Args: as for `sweep.run_chains`."""
    if jobs < 1:
        raise ConfigError(f"--jobs must be 1 or more, is {jobs}")
    if ray:
        return _Ray(work, traces, ray, jobs)
    return _Here(work, traces) if jobs == 1 else _Processes(work, traces, jobs)


class _Here(AbstractContextManager[Backend]):
    """One task at a time, in this process."""

    slots = 1

    def __init__(self, work: Work, traces: Mapping[str, Trace]) -> None:
        self._work = work
        self._context = Context(traces, stopped=lambda: False)
        self._task: tuple[int, Any] = (0, None)

    def submit(self, key: int, task: Any) -> None:
        self._task = (key, task)

    def wait(self) -> tuple[int, Any]:
        key, task = self._task
        return key, self._work(self._context, task)

    def __exit__(self, *_: object) -> None:
        return None


class _Processes(AbstractContextManager[Backend]):
    """A process per core. The traces lie in files that all of them map."""

    def __init__(self, work: Work, traces: Mapping[str, Trace], jobs: int) -> None:
        self.slots = jobs
        self._work = work
        self._traces = traces
        self._pending: dict[Future[Any], int] = {}

    def __enter__(self) -> Backend:
        self._folder = tempfile.TemporaryDirectory(prefix="prfaas-sweep-")
        store_traces(self._traces, Path(self._folder.name))
        context = multiprocessing.get_context("spawn")
        self._stop = context.Event()
        self._pool = ProcessPoolExecutor(
            self.slots,
            mp_context=context,
            initializer=_begin_process,
            initargs=(without_columns(self._traces), self._folder.name, self._stop, os.getpid()),
        )
        return self

    def submit(self, key: int, task: Any) -> None:
        # Ctrl-C reaches every process of a terminal. Those born while it is ignored (the pool starts them
        # here) ignore it for life; this one passes it on through `stop`.
        with _interrupts_ignored():
            self._pending[self._pool.submit(_work_here, self._work, task)] = key

    def wait(self) -> tuple[int, Any]:
        done, _ = wait(self._pending, return_when=FIRST_COMPLETED)
        future = min(done, key=lambda future: self._pending[future])
        try:
            return self._pending.pop(future), future.result()
        except BrokenProcessPool as error:
            raise PrfaasError("a process of the sweep died (out of memory?); try fewer --jobs") from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._pending:  # after Ctrl-C nobody waits for what still runs
            self._pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
        self._pool.shutdown(cancel_futures=True)
        self._folder.cleanup()


_context: Context | None = None
"""Of a worker process: set once, before its first task."""


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set signal handlers, and only it is interrupted
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _begin_process(plain: dict[str, Trace], folder: str, stop: Any, parent_pid: int) -> None:
    global _context
    with suppress(ImportError, OSError, AttributeError):  # Linux only; elsewhere the pool ends its processes
        from prfaas.die_with_parent import die_with_parent

        die_with_parent(parent_pid)
    _context = Context(map_traces(plain, Path(folder)), stop.is_set)


def _work_here(work: Work, task: Any) -> Any:
    assert _context is not None
    return work(_context, task)


class _Ray(AbstractContextManager[Backend]):
    """Tasks of a Ray cluster; the traces go into its object store once."""

    def __init__(self, work: Work, traces: Mapping[str, Trace], address: str, jobs: int) -> None:
        self._work, self._traces, self._address, self._jobs = work, traces, address, jobs
        self._pending: dict[Any, int] = {}

    def __enter__(self) -> Backend:
        try:
            import ray
        except ImportError as error:
            raise ConfigError(
                "--ray needs the package `ray`: pip install 'prfaas[ray]' (or leave --ray away)"
            ) from error
        self._ray = ray
        self._started = not ray.is_initialized()
        if self._started:
            local = {"num_cpus": self._jobs, "include_dashboard": False}
            where = local if self._address == "local" else {"address": self._address}
            _check_reachable(self._address)
            try:
                ray.init(log_to_driver=False, logging_level="error", **where)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError(f"--ray {self._address}: {error}") from error
        self.slots = max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._shared = ray.put(dict(self._traces))
        self._remote = ray.remote(num_cpus=1, max_retries=2)(_work_on_ray)
        return self

    def submit(self, key: int, task: Any) -> None:
        self._pending[self._remote.remote(self._work, self._shared, task)] = key

    def wait(self) -> tuple[int, Any]:
        done, _ = self._ray.wait(list(self._pending), num_returns=1)
        key = self._pending.pop(done[0])
        try:
            return key, self._ray.get(done[0])
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def __exit__(self, *_: object) -> None:
        for reference in self._pending:
            self._ray.cancel(reference, force=True)
        if self._started:
            self._ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray itself would wait for minutes for a cluster that does not answer.

    Args:
        address: HOST:PORT, maybe with `ray://` in front; others (`local`, `auto`) are for Ray to understand.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--ray {address}: nothing answers there ({error}); is it the address that `ray start` printed?"
        ) from error


def _work_on_ray(work: Work, traces: dict[str, Trace], task: Any) -> Any:
    return work(Context(traces, stopped=lambda: False), task)
