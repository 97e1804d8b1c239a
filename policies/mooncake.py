"""The least predicted TTFT over prefill instances, or an early refusal."""

from __future__ import annotations

import numpy as np

from policies.base import BasePolicy
from policies.pairing import Where, decode_occupancy, site_then_decode
from policies.types import REFUSE, Candidates, FleetView, RequestView


class Mooncake(BasePolicy):
    """Algorithm 1 of Mooncake (FAST '25): the prefill instance with the least
    TTFT = T_queue + T_prefill + T_transfer, then the decode instance with the least KV in use; refused above
    the SLO.

    Its T_transfer fetches a longer prefix from another prefill instance, and hot blocks are copied so;
    neither is possible here. T_transfer is instead that of the prompt's KV to the decode worker, as far as
    prefill does not hide it. T_prefill is measured, where Mooncake has a fitted model of length and prefix.

    Args:
        ttft_slo_s: refuse a request whose TTFT would be longer; None = never.
        tbt_slo_s: refuse where the decode worker's next step would be longer; None = never.
        where: sites considered (`policies.pairing.Where`).

    Raises:
        ValueError: an SLO is not positive, or `where` is another word.
    """

    def __init__(
        self, ttft_slo_s: float | None = None, tbt_slo_s: float | None = None, where: str = "prefill"
    ) -> None:
        for slo_s in (ttft_slo_s, tbt_slo_s):
            if slo_s is not None and slo_s <= 0:
                raise ValueError(f"an SLO must be positive, is {slo_s} s")
        self._ttft_s = np.inf if ttft_slo_s is None else ttft_slo_s
        self._tbt_s = np.inf if tbt_slo_s is None else tbt_slo_s
        self._where = Where(where)

    def choose(
        self, request: RequestView, candidates: Candidates, view: FleetView, rng: np.random.Generator
    ) -> int:
        ttft_s = candidates.start_s + candidates.prefill_s + candidates.transfer_s
        load = decode_occupancy(candidates, view)
        row = site_then_decode(ttft_s, load, candidates, view, rng, self._where.rows(candidates))
        if ttft_s[row] > self._ttft_s or candidates.step_s[row] > self._tbt_s:
            return REFUSE
        return row
