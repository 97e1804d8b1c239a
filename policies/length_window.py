"""The last requests with what each would have cost in either place: what a threshold is solved on."""

from __future__ import annotations

import numpy as np

from policies.threshold_solver import Samples

HOME_TOKENS, AWAY_TOKENS, HOME_S, AWAY_S, KV_BYTES, CACHED_TOKENS = range(6)


class LengthWindow:
    """A ring of the last `size` requests, counterfactuals of all, whichever way each went."""

    def __init__(self, size: int) -> None:
        self._rows = np.zeros((size, 6))
        self._total = 0

    def __len__(self) -> int:
        return min(self._total, len(self._rows))

    def add(
        self,
        *,
        home_tokens: int,
        away_tokens: int,
        home_s: float,
        away_s: float,
        kv_bytes: float,
        cached_tokens: int,
    ) -> None:
        """One request.

        Args:
            home_tokens: of its prompt not cached in the PD cluster.
            away_tokens: not cached across the link.
            home_s: prefill seconds that it takes from the PD cluster's prefill workers if it stays.
            away_s: from the remote ones if it goes.
            kv_bytes: crossing the link if it goes.
            cached_tokens: of its prompt cached in the PD cluster.
        """
        self._rows[self._total % len(self._rows)] = (
            home_tokens, away_tokens, home_s, away_s, kv_bytes, cached_tokens,
        )  # fmt: skip
        self._total += 1

    def samples(self, scarce: bool) -> Samples:
        """With the lengths that the threshold compares: where bandwidth is `scarce`, each cluster's cache is
        judged alone; where it is abundant, the longer of the two cached prefixes counts."""
        rows = self._rows[: len(self)]
        length = rows[:, HOME_TOKENS]
        if not scarce:
            length = np.minimum(length, rows[:, AWAY_TOKENS])
        return Samples(length.astype(np.int64), rows[:, HOME_S], rows[:, AWAY_S], rows[:, KV_BYTES])

    def reuse(self) -> float:
        """Cached tokens per token to compute in the PD cluster."""
        rows = self._rows[: len(self)]
        computed = rows[:, HOME_TOKENS].sum()
        return float(rows[:, CACHED_TOKENS].sum() / computed) if computed else 0.0
