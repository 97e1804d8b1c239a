"""What the gateway's routes share."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from prfaas.config import Config
from prfaas.protocol.openai_errors import ApiError
from router.admission import Admission
from router.brain import Brain
from router.dispatch import Dispatcher
from router.metrics import GatewayMetrics
from router.prompts import PromptPipeline, TextModel
from router.trace import Recorder
from router.workers import Workers


@dataclass(slots=True, kw_only=True)
class Gateway:
    """One gateway's parts."""

    config: Config
    model: TextModel
    prompts: PromptPipeline
    brain: Brain
    workers: Workers
    dispatcher: Dispatcher
    recorder: Recorder
    metrics: GatewayMetrics
    admission: Admission
    started_unix_s: int

    def check_model(self, name: str | None) -> None:
        """Refuse other models than ours.

        Raises:
            ApiError: 404 that names the model we serve.
        """
        if name is not None and name != self.model.name:
            raise ApiError(
                404,
                f"the model `{name[:200]}` does not exist; this service has `{self.model.name}`",
                param="model",
                code="model_not_found",
            )

    def context_length(self) -> int:
        """Tokens of the model's context.

        Raises:
            ApiError: 503, no decode worker has joined.
        """
        length = self.workers.context_length()
        if length is None:
            raise ApiError(503, "no decode worker is there", code="no_decode_worker", retry_after_s=1.0)
        return length


GATEWAY: web.AppKey[Gateway] = web.AppKey("gateway", Gateway)
