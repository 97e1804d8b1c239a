"""Results as a run would leave them, made from a few distributions: for tests of summaries and reports."""

from __future__ import annotations

import numpy as np

from prfaas.config import LinkConfig
from prfaas.units import Rate, Seconds
from simulations.fleet import SLO, Fleet, HardwareSpec, ModelSpec, SimCluster, SimWorkers
from simulations.result import FAILED, REFUSED, SERVED, UNFINISHED, ResourceUse, RunResult

GRID = 240


def make_fleet(slo: SLO | None = None) -> Fleet:
    """Two clusters: 2 prefill + 4 decode workers at 2 and 1 per hour, one remote prefill worker at 6."""

    def hardware(price: float) -> HardwareSpec:
        return HardwareSpec(points={"prefill": [[0, 0], [1, 1]]}, kv_tokens=1_000_000, price_per_hour=price)

    return Fleet(
        name="test fleet",
        model=ModelSpec(name="test-8b", layers=32, kv_bytes_per_token=131_072),
        clusters={
            "pd": SimCluster(
                kind="pd",
                workers={
                    "prefill": SimWorkers(role="prefill", hardware="mid", count=2),
                    "decode": SimWorkers(role="decode", hardware="small", count=4),
                },
            ),
            "remote": SimCluster(
                kind="prefill", workers={"fast": SimWorkers(role="prefill", hardware="big")}
            ),
        },
        links={"wan": LinkConfig(between=("remote", "pd"), capacity=Rate.parse("10Gbit"), rtt=Seconds(0.02))},
        hardware={"mid": hardware(2.0), "small": hardware(1.0), "big": hardware(6.0)},
        slo=slo if slo is not None else SLO(ttft_p90=Seconds(5.0), tpot_p90=Seconds(0.06)),
    )


def make_result(
    policy: str = "cost_model",
    *,
    requests: int = 2000,
    seed: int = 0,
    slowness: float = 1.0,
    refused: float = 0.0,
    failed: int = 0,
    complete: bool = True,
) -> RunResult:
    """`slowness` scales latencies, `refused` is the share of requests refused, `failed` a number of them."""
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.exponential(0.2, requests))
    prompt = np.maximum(2, rng.lognormal(8.5, 1.0, requests)).astype(np.int64)
    output = np.maximum(2, rng.lognormal(5.3, 0.8, requests)).astype(np.int64)
    cached = (prompt * rng.beta(0.7, 1.2, requests)).astype(np.int64) // 512 * 512
    wave = 1 + 0.6 * np.sin(arrival_s / arrival_s[-1] * 9)
    ttft_s = slowness * (0.08 + (prompt - cached) / 9000 * wave + rng.exponential(0.35, requests) * wave)
    tpot_s = slowness * (0.021 + rng.gamma(3.0, 0.004, requests) * wave)
    kind = np.where(
        cached > prompt / 2, 0, np.where(prompt < 3000, 1, np.where(rng.random(requests) < 0.55, 2, 3))
    )
    state = np.where(rng.random(requests) < refused, REFUSED, SERVED)
    state[:failed] = FAILED
    if not complete:
        state[-requests // 4 :] = UNFINISHED
    lost = state != SERVED
    workers = ("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2", "decode-3", "fast")
    decode = rng.integers(2, 6, requests)
    site = np.where(kind <= 1, decode, np.where(kind == 2, rng.integers(0, 2, requests), 6))
    end_s = arrival_s + ttft_s + tpot_s * (output - 1)
    regret_s = np.where(rng.random(requests) < 0.8, 0.0, rng.exponential(0.2, requests) * slowness)
    return RunResult(
        policy=policy,
        fleet="test fleet",
        trace="synthetic",
        seed=seed,
        complete=complete,
        state=state.astype(np.int64),
        refusal=tuple("" if s == SERVED else "queues_full" for s in state),
        arrival_s=arrival_s,
        ttft_s=np.where(lost, np.nan, ttft_s),
        tpot_s=np.where(lost, np.nan, tpot_s),
        end_s=np.where(lost, np.nan, end_s),
        prompt_tokens=prompt,
        output_tokens=output,
        kind=np.where(lost, -1, kind),
        decode=np.where(lost, -1, decode),
        site=np.where(lost, -1, site),
        decode_cached_tokens=np.where(kind == 0, cached, 0),
        site_cached_tokens=cached,
        kv_bytes=np.where(kind == 3, (prompt - cached) * 131_072, 0),
        attempts=np.ones(requests, dtype=np.int64),
        predicted_ttft_s=ttft_s * rng.lognormal(0, 0.2, requests),
        regret_s=np.where(lost, np.nan, regret_s),
        workers=workers,
        times_s=np.linspace(0, float(arrival_s[-1]), GRID),
        resources=_resources(rng, workers, float(arrival_s[-1])),
    )


def _resources(rng: np.random.Generator, workers: tuple[str, ...], end_s: float) -> tuple[ResourceUse, ...]:
    phase = np.linspace(0, 9, GRID)

    def level(mean: float) -> np.ndarray:
        noise = rng.normal(0, 0.06, GRID)
        return np.clip(mean * (1 + 0.3 * np.sin(phase)) + noise, 0, 1)

    found = []
    for name in workers:
        prefill = not name.startswith("decode")
        utilisation = level(0.75 if prefill else 0.6)
        samples = {"utilisation": utilisation, "queue": np.round(np.maximum(0, utilisation - 0.7) * 30)}
        if not prefill:
            samples |= {"running": np.round(utilisation * 40), "pages": level(0.7)}
        found.append(
            ResourceUse(name, "prefill" if prefill else "decode", busy_s=0.7 * end_s, samples=samples)
        )
    for name, mean in (("remote->pd", 0.5), ("pd->remote", 0.02)):
        found.append(ResourceUse(name, "link", busy_s=mean * end_s, samples={"utilisation": level(mean)}))
    return tuple(found)
