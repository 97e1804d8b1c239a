"""Dynamo's KV router: blocks to compute plus blocks to hold."""

from __future__ import annotations

import numpy as np

from policies.base import BasePolicy, gather, least
from policies.pairing import Where
from policies.types import Candidates, FleetView, Floats, RequestView

BLOCK_TOKENS = 16


class DynamoKV(BasePolicy):
    """Least scale · max(0, active prefill + incoming - overlap) + active decode + incoming + w · requests.

    Dynamo's KV cost, in blocks; drawn by softmax instead of the least where there is a temperature. With
    separate prefill its prefill and decode routers each use this on their own pool: here the first term is
    the prefill site's, the others the decode worker's. Cached tiers below GPU memory are not known.

    Args:
        prefill_load_scale: weight of the first term: more for TTFT, less for time per token.
        request_weight: blocks that an active request counts beside its KV.
        temperature: of the softmax over costs scaled to 0 … 1; 0 = always the least.
        block_tokens: tokens per block, of importance only to `request_weight`.
        where: sites considered (`policies.pairing.Where`).

    Raises:
        ValueError: a number is out of range, or `where` is another word.
    """

    def __init__(
        self,
        prefill_load_scale: float = 1.0,
        request_weight: float = 0.0,
        temperature: float = 0.0,
        block_tokens: int = BLOCK_TOKENS,
        where: str = "prefill",
    ) -> None:
        if min(prefill_load_scale, request_weight, temperature) < 0 or block_tokens < 1:
            raise ValueError(
                "prefill_load_scale, request_weight and temperature must be 0 or more, block_tokens 1 or more"
            )
        self._scale, self._weight, self._temperature = prefill_load_scale, request_weight, temperature
        self._block = block_tokens
        self._where = Where(where)

    def choose(
        self, request: RequestView, candidates: Candidates, view: FleetView, rng: np.random.Generator
    ) -> int:
        rows = self._where.rows(candidates)
        cost = self.cost(request, candidates, view)
        if self._temperature == 0:
            return least(cost, candidates, view, rng, rows)
        return int(rows[_softmax_draw(cost[rows], self._temperature, rng)])

    def cost(self, request: RequestView, candidates: Candidates, view: FleetView) -> Floats:
        """Of each row, in blocks."""
        queued = gather(view.queued_tokens, candidates.site)
        prefill = np.maximum(0.0, queued + request.prompt_tokens - candidates.site_cached_tokens)
        pages = gather(view.total_pages, candidates.decode) - gather(view.free_pages, candidates.decode)
        decode = pages * gather(view.page_tokens, candidates.decode) + request.prompt_tokens
        requests = gather(view.running, candidates.decode) + gather(view.waiting, candidates.decode)
        cost: Floats = (self._scale * prefill + decode) / self._block + self._weight * requests
        return cost


def _softmax_draw(cost: Floats, temperature: float, rng: np.random.Generator) -> int:
    """An index, the likelier the less it costs."""
    spread = float(cost.max() - cost.min())
    if spread == 0:
        return int(rng.integers(len(cost)))
    weight = np.exp(-(cost - cost.min()) / (spread * temperature))
    return int(min(np.searchsorted(np.cumsum(weight), rng.random() * weight.sum()), len(cost) - 1))
