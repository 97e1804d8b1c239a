"""A thread that runs one step again and again, as often as the step asks for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

_PAUSE_AFTER_ERROR_S = 0.1
_MIN_PAUSE_S = 0.0001
_JOIN_S = 5.0


class Poller:
    """Calls `step` in a thread of its own. The step returns seconds until its next call, or None to sleep
    until `wake`. It always pauses before a call that the step itself asked for: a spinning Python thread
    starves everything else."""

    def __init__(self, name: str, step: Callable[[], float | None]) -> None:
        self._name = name
        self._step = step
        self._woken = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Run the step soon. Thread safe."""
        self._woken.set()

    def stop(self) -> None:
        """End the thread after its current step and wait for it. May be called again."""
        self._stopped = True
        self._woken.set()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            logger.error("event=poller_stuck name=%s waited_s=%s", self._name, _JOIN_S)

    def _run(self) -> None:
        while not self._stopped:
            self._woken.clear()
            try:
                pause_s = self._step()
            except Exception:
                # A bug in one step must not end all transfers; whatever it left undone meets its deadline.
                logger.exception("event=poller_step_failed name=%s", self._name)
                pause_s = _PAUSE_AFTER_ERROR_S
            if not self._stopped:
                self._woken.wait(None if pause_s is None else max(pause_s, _MIN_PAUSE_S))
