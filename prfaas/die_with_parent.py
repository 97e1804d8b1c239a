"""Have the kernel kill this process when its parent dies, however the parent dies.

As a program it does so and becomes another command:

    python die_with_parent.py PARENT_PID COMMAND [ARGUMENT ...]

PR_SET_PDEATHSIG survives exec. The program imports nothing of the project and is run as a file: a fork hook
in a process with threads would not be safe.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """From now on the kernel kills this process when the thread that started it ends.

    Raises:
        SystemExit: the parent is gone already.
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before prctl took effect
        raise SystemExit(f"parent {parent_pid} is gone already")


def main(arguments: list[str]) -> None:
    """Become the command, unless the parent is gone already.

    Raises:
        OSError: prctl or exec failed.
    """
    parent_pid, *command = arguments
    die_with_parent(int(parent_pid))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
