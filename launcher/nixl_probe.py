"""Try NIXL for real and print what was found as JSON; run by the doctor as a process of its own.

Native libraries that do not fit the machine may crash or hang: the doctor must survive that.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

_BYTES = 64 * 1024
_TIMEOUT_S = 20.0


def main() -> None:
    """Print the findings.

    Raises:
        ImportError: NIXL is not installed or its libraries do not load.
    """
    os.environ.setdefault("UCX_TLS", "tcp,self")
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    import nixl_cu12._api as nixl

    sender, receiver = _agent(nixl, "doctor-sender"), _agent(nixl, "doctor-receiver")
    findings: dict[str, Any] = {
        "module": "nixl_cu12",
        "version": _version(),
        "plugins": sorted(sender.get_plugin_list()),
        "transports": os.environ["UCX_TLS"],
    }
    if "UCX" in findings["plugins"]:
        findings["transfer_s"], findings["intact"] = _transfer(sender, receiver)
    print(json.dumps(findings))
    sys.stdout.flush()
    os._exit(0)  # the answer is out: nothing that a library does at exit matters


def _agent(nixl: Any, name: str) -> Any:
    sync = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    agent = nixl.nixl_agent(
        name, nixl.nixl_agent_config(enable_prog_thread=False, backends=[], sync_mode=sync)
    )
    if "UCX" in agent.get_plugin_list():
        agent.create_backend("UCX", dict(agent.get_plugin_params("UCX")))
    return agent


def _transfer(sender: Any, receiver: Any) -> tuple[float, bool]:
    """(seconds from posting to DONE, whether the bytes arrived as they were)."""
    source = np.random.default_rng(0).integers(0, 256, _BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    for agent, buffer in ((sender, source), (receiver, target)):
        agent.register_memory([(buffer.ctypes.data, _BYTES, 0, "")], "DRAM")
    peer = sender.add_remote_agent(receiver.get_agent_metadata())
    here = sender.get_xfer_descs([(source.ctypes.data, _BYTES, 0)], "DRAM")
    there = sender.get_xfer_descs([(target.ctypes.data, _BYTES, 0)], "DRAM")
    handle = sender.initialize_xfer("WRITE", here, there, peer, b"doctor")
    began_s = time.monotonic()
    state = sender.transfer(handle)
    while state != "DONE":
        if state == "ERR" or time.monotonic() - began_s > _TIMEOUT_S:
            raise RuntimeError(f"transfer between two local agents ended as {state}")
        receiver.get_new_notifs()
        time.sleep(0.001)
        state = sender.check_xfer_state(handle)
    elapsed_s = time.monotonic() - began_s
    return elapsed_s, bool(np.array_equal(source, target))


def _version() -> str:
    try:
        return version("nixl-cu12")
    except PackageNotFoundError:
        return "unknown"


if __name__ == "__main__":
    main()
