"""A runner process: one rank's model over the shared KV pool, one step at a time.

Started by `RunnerLink` as `python -m prfaas.engine.runner_process <RunnerConfig as JSON>` with three
inherited descriptors. It lives as long as its parent: it ends when the socket closes, and the kernel kills
it if the parent dies. It ignores SIGINT and SIGTERM, which reach whole process groups: the parent decides
when running steps are over.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec

from prfaas.die_with_parent import die_with_parent
from prfaas.engine.duty_cycle import DutyCycle
from prfaas.engine.framing import BlockingChannel
from prfaas.engine.step import RunnerError, RunnerReady, StepPlan
from prfaas.kv.layout import KVLayout
from prfaas.kv.shared_buffer import SharedBuffer, SharedLayerCounter

logger = logging.getLogger(__name__)


class RunnerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a runner is told at its start."""

    parent_pid: int
    socket_fd: int
    pool_fd: int
    counter_fd: int
    model_path: str
    layout: KVLayout
    device: str
    dtype: str
    threads: int
    cpus: list[int] = []
    """CPU affinity; empty = any."""
    cpu_share: float = 1.0
    """See `DutyCycle`."""


def serve(config: RunnerConfig, channel: BlockingChannel) -> None:
    """Load the model, say so, and execute plans until the other side closes."""
    from prfaas.engine.runner import ModelRunner  # torch reads affinity and thread settings when imported

    pool = SharedBuffer.attach(config.pool_fd, config.layout.pool_bytes)
    counter = SharedLayerCounter.attach(config.counter_fd)
    duty_cycle = DutyCycle(config.cpu_share, config.threads)

    def on_layer() -> None:
        counter.increment()
        duty_cycle.rest()

    runner = ModelRunner(
        Path(config.model_path),
        config.layout,
        pool.array.data,
        device=config.device,
        dtype=config.dtype,
        threads=config.threads,
        on_layer=on_layer,
    )
    channel.send(RunnerReady(vocab_size=runner.vocab_size))
    while (plan := channel.receive()) is not None:
        try:
            answer: msgspec.Struct = runner.execute(plan)
        except Exception as error:
            logger.exception("event=step_failed step=%d", plan.step)
            answer = RunnerError(step=plan.step, message=f"{type(error).__name__}: {error}")
        channel.send(answer)


def main() -> None:
    """Entry point of the child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    config = msgspec.json.decode(sys.argv[1], type=RunnerConfig)
    die_with_parent(config.parent_pid)
    if config.cpus:
        os.sched_setaffinity(0, config.cpus)
    code = 0
    with socket.socket(fileno=config.socket_fd) as sock:
        try:
            serve(config, BlockingChannel(sock, StepPlan))
        except (BrokenPipeError, ConnectionResetError):
            logger.info("event=parent_closed")
        except Exception:
            # Said before the socket closes: the parent quotes these words when it sees that.
            logger.exception("event=runner_failed")
            code = 1
    # Nothing is left to tidy, and torch's own way out takes seconds on a busy machine.
    os._exit(code)


if __name__ == "__main__":
    main()
