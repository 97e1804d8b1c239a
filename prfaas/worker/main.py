"""The worker's control process: what `prfaas worker` and `python -m prfaas.worker.main` run."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import uvloop
from aiohttp import web

from prfaas.config import Config
from prfaas.config_load import load
from prfaas.die_with_parent import die_with_parent
from prfaas.errors import EngineFailure, PrfaasError
from prfaas.transfer.agent import TransferError
from prfaas.worker.build import build_host
from prfaas.worker.host import WorkerHost
from prfaas.worker.http import build_app

_LOG = logging.getLogger(__name__)
PARENT_VARIABLE = "PRFAAS_PARENT_PID"
"""Process id of the parent to die with; empty = outlive it."""
SHUTDOWN_TIMEOUT_S = 1.0


def run_worker(config: Config, name: str) -> None:
    """Serve as the worker `name` until told to stop; blocks.

    SIGTERM (or Ctrl-C) drains, a second signal ends at once.

    Raises:
        SystemExit: status 1 if the engine did not start or failed; a supervisor should start it again.
        PrfaasError: the configuration or the address cannot be used.
    """
    if parent := os.environ.get(PARENT_VARIABLE):
        die_with_parent(int(parent))
    try:
        uvloop.run(serve_all(config, [name]))
    except (EngineFailure, TransferError) as error:
        _LOG.error("worker=%s failed: %s", name, error)
        sys.exit(1)


async def serve_all(config: Config, names: Sequence[str]) -> None:
    """Serve as the workers `names` in the running loop until a signal comes, or one of them fails.

    Raises:
        EngineFailure: an engine did not start or failed; the others are ended.
    """
    ending: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    _handle_signals(ending)
    serving = [asyncio.ensure_future(_serve(config, name, ending)) for name in names]
    await asyncio.wait(serving, return_when=asyncio.FIRST_EXCEPTION)
    if not ending.done():
        ending.set_result(0)
    await asyncio.gather(*serving)


async def _serve(config: Config, name: str, ending: asyncio.Future[int]) -> None:
    host = build_host(config, name)
    runner = web.AppRunner(
        build_app(host),
        handler_cancellation=True,
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        access_log=None,
    )
    await runner.setup()
    try:
        # Listening comes first: probes see `starting` while the model loads.
        await _listen(runner, host)
        if await _started(host, ending):
            await _until_end(host, ending)
    finally:
        await host.stop()
        await runner.cleanup()
        _LOG.info("worker=%s stopped", name)


async def _listen(runner: web.AppRunner, host: WorkerHost) -> None:
    address, port = host.spec.host, host.spec.port
    try:
        await web.TCPSite(runner, address, port).start()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise PrfaasError(f"worker {host.name} cannot listen on {address}:{port}: {reason}") from error
    _LOG.info("worker=%s state=starting host=%s port=%d", host.name, address, port)


async def _started(host: WorkerHost, ending: asyncio.Future[int]) -> bool:
    """Start the engine; False if a signal came first.

    Raises:
        EngineFailure: the engine did not become ready.
    """
    start = asyncio.create_task(host.start(), name="host-start")
    await _first_of(start, ending)
    if not start.done():
        start.cancel()
        await asyncio.wait([start])
        return False
    start.result()
    # What was loaded stays: a full collection would stall the loop for as long as it walks all of that.
    gc.collect()
    gc.freeze()
    return True


async def _until_end(host: WorkerHost, ending: asyncio.Future[int]) -> None:
    """Wait for a signal or the engine's failure; leave with nothing running.

    Raises:
        EngineFailure: the engine failed.
    """
    await _first_of(ending, host.engine_failure)
    if not host.engine_failure.done():
        await host.drain()
        return
    failure = host.engine_failure.result()
    await host.fail(str(failure))
    raise failure


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def _handle_signals(ending: asyncio.Future[int]) -> None:
    def on_signal(number: int) -> None:
        if ending.done():
            os._exit(128 + number)  # asked twice: the runner processes die with us
        ending.set_result(number)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


def main() -> None:
    """Start from a configuration file, without the launcher."""
    parser = argparse.ArgumentParser(prog="python -m prfaas.worker.main", description=__doc__)
    parser.add_argument("-c", "--config", required=True)
    parser.add_argument("-n", "--name", required=True)
    parser.add_argument("--die-with-parent", action="store_true", help=f"like {PARENT_VARIABLE}=<parent>")
    arguments = parser.parse_args()
    if arguments.die_with_parent:
        os.environ[PARENT_VARIABLE] = str(os.getppid())
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", level=logging.INFO)
    try:
        run_worker(load(arguments.config), arguments.name)
    except PrfaasError as error:
        sys.exit(f"prfaas worker: {error}")


if __name__ == "__main__":
    main()
