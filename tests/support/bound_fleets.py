"""Fleets of a few workers with made-up linear hardware, for tests of the bound."""

from __future__ import annotations

from prfaas.config import LinkConfig
from prfaas.units import Rate, Seconds
from simulations.fleet import Fleet, HardwareSpec, ModelSpec, SimCluster, SimWorkers

KV_BYTES = 1000
FAST = {
    "prefill_base_s": 0.01,
    "prefill_token_s": 1e-4,
    "prefill_context_s": 1e-8,
    "decode_base_s": 0.02,
    "decode_sequence_s": 0.001,
    "decode_context_s": 1e-6,
}
SLOW = {name: 2.5 * value for name, value in FAST.items()}


def make_fleet(
    *,
    prefill: int = 1,
    decode: int = 1,
    remote: int = 0,
    max_running: int = 4,
    kv_tokens: int = 100_000,
    link: str = "1Gbit",
    page_size: int = 64,
    chunk_tokens: int = 512,
    local: dict[str, float] = FAST,
    far: dict[str, float] = FAST,
    state_bytes: int = 0,
) -> Fleet:
    """A PD cluster `pd` of groups `p` and `d`, and beyond link `wan` a cluster `far` with group `t`."""
    hardware = {
        name: HardwareSpec(linear=linear, kv_tokens=kv_tokens, chunk_tokens=chunk_tokens)
        for name, linear in (("near", local), ("far", far))
    }
    workers = {"d": SimWorkers(role="decode", hardware="near", count=decode, max_running=max_running)}
    if prefill:
        workers["p"] = SimWorkers(role="prefill", hardware="near", count=prefill)
    clusters = {"pd": SimCluster(kind="pd", workers=workers)}
    links = {}
    if remote:
        site = SimWorkers(role="prefill", hardware="far", count=remote)
        clusters["far"] = SimCluster(kind="prefill", workers={"t": site})
        links["wan"] = LinkConfig(between=("pd", "far"), capacity=Rate.parse(link), rtt=Seconds(0.01))
    return Fleet(
        name="test",
        model=ModelSpec(name="m", layers=4, kv_bytes_per_token=KV_BYTES, state_bytes=state_bytes),
        clusters=clusters,
        links=links,
        hardware=hardware,
        page_size=page_size,
    )
