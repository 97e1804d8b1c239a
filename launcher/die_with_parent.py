"""Run a command that the kernel kills when its parent dies, however the parent dies.

    python die_with_parent.py PARENT_PID COMMAND [ARGUMENT ...]

PR_SET_PDEATHSIG survives exec, so this small program sets it and becomes the command. It imports nothing of
the project and is run as a file: a fork hook in a process with threads would not be safe.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Become the command, unless the parent is gone already.

    Raises:
        OSError: prctl or exec failed.
    """
    parent_pid, *command = arguments
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent_pid):  # it died before prctl took effect
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
