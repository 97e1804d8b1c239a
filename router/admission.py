"""How many requests the gateway holds at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from prfaas.protocol.openai_errors import ApiError
from router.metrics import GatewayMetrics


class Admission:
    """Counts choices in flight; beyond the limit, and while the gateway starts or drains, it refuses."""

    def __init__(self, limit: int, metrics: GatewayMetrics) -> None:
        self._limit = limit
        self._metrics = metrics
        self.inflight = 0
        self.started = False
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self) -> None:
        """Return once nothing is held."""
        await self._idle.wait()

    @contextmanager
    def hold(self, choices: int) -> Iterator[None]:
        """Hold `choices` places while the block runs.

        Raises:
            ApiError: 429 at the limit; 503 before the gateway is ready, or once it drains.
        """
        if self.draining:
            raise self._refuse("draining", 503, "the gateway is shutting down", 1.0)
        if not self.started:
            raise self._refuse("starting", 503, "the gateway is starting: workers are being measured", 2.0)
        if self.inflight + choices > self._limit:
            message = f"{self.inflight} requests are in flight; the limit is {self._limit}"
            raise self._refuse("inflight_limit", 429, message, 1.0)
        self.inflight += choices
        self._idle.clear()
        try:
            yield
        finally:
            self.inflight -= choices
            if not self.inflight:
                self._idle.set()

    def _refuse(self, reason: str, status: int, message: str, retry_after_s: float) -> ApiError:
        self._metrics.rejections.labels(reason).inc()
        return ApiError(status, message, code=reason, retry_after_s=retry_after_s)
