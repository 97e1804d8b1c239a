"""Several workers in one process: for paced engines, which do not compute.

Each has its own port, pool, peer sessions and NIXL agents, exactly as if it were alone; they share the event
loop, so a process that is short of CPU makes all of them late.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

import uvloop

from prfaas.config import Config
from prfaas.config_load import load
from prfaas.die_with_parent import die_with_parent
from prfaas.errors import ConfigError, EngineFailure, PrfaasError
from prfaas.transfer.agent import TransferError
from prfaas.worker.main import serve_all


def run_workers(config: Config, names: Sequence[str]) -> None:
    """Serve as the workers `names` until told to stop; blocks.

    Raises:
        ConfigError: a worker is not in the configuration, or its engine is not a paced one.
        EngineFailure, TransferError: one of them did not start.
    """
    for name in names:
        try:
            _, spec = config.worker(name)
        except KeyError:
            raise ConfigError(f"there is no worker {name} in this configuration") from None
        if spec.engine != "paced":
            raise ConfigError(f"worker {name} has a {spec.engine} engine; only paced ones share a process")
    uvloop.run(serve_all(config, names))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m prfaas.worker.many", description=__doc__)
    parser.add_argument("-c", "--config", required=True)
    parser.add_argument("-n", "--name", required=True, action="append", help="once per worker")
    parser.add_argument("--die-with-parent", action="store_true")
    arguments = parser.parse_args()
    if arguments.die_with_parent:
        die_with_parent(os.getppid())
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", level=logging.INFO)
    try:
        run_workers(load(arguments.config), arguments.name)
    except (EngineFailure, TransferError, PrfaasError) as error:
        sys.exit(f"paced workers: {error}")


if __name__ == "__main__":
    main()
