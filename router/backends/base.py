"""What the gateway asks of a serving engine. The scheduler does not know backends."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from prfaas.protocol.messages import GenerateFrame, GenerateRequest


class Backend(Protocol):
    """Carries out placements on workers of one kind of engine."""

    def generate(
        self, worker: str, url: str, request: GenerateRequest
    ) -> AsyncGenerator[GenerateFrame, None]:
        """Run one attempt on the decode worker at `url`; ends after `Finished`.

        Closing the iterator cancels the attempt on both legs.

        Raises:
            AttemptFailed: the attempt is over; the message says why and `site` who is at fault.
        """
        ...
