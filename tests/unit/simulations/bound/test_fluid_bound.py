"""The fluid bound against hand reckonings, every assignment of small cases, and its own prices."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import msgspec
import numpy as np
import pytest
from bound_fleets import FAST, KV_BYTES, SLOW, make_fleet
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.errors import ConfigError
from prfaas.units import Rate
from simulations.bound import fluid_bound
from simulations.bound.needs import least_needs
from simulations.bound.places import places
from simulations.bound.prefix import seen_before
from simulations.fleet import Fleet, ScheduledChange
from simulations.workload.trace import Trace


def make_trace(prompts, outputs, blocks=None, block_tokens=64) -> Trace:
    count = len(prompts)
    chains = blocks or [[] for _ in range(count)]
    return Trace(
        name="t",
        arrival_s=np.arange(count, dtype=np.float64),
        prompt_tokens=np.array(prompts),
        output_tokens=np.array(outputs),
        block_tokens=block_tokens,
        blocks=np.array([block for chain in chains for block in chain], dtype=np.int64),
        block_offsets=np.cumsum([0, *map(len, chains)]),
    )


def prefill_s(new: int, cached: int, linear: dict[str, float] = FAST, chunk: int = 512) -> float:
    """Chunk by chunk, as the profile is defined."""
    total = 0.0
    while new > 0:
        n = min(new, chunk)
        total += linear["prefill_base_s"] + n * linear["prefill_token_s"]
        total += n * (cached + n / 2) * linear["prefill_context_s"]
        new, cached = new - n, cached + n
    return total


def step_s(contexts, linear: dict[str, float] = FAST) -> float:
    return (
        linear["decode_base_s"]
        + len(contexts) * linear["decode_sequence_s"]
        + sum(contexts) * linear["decode_context_s"]
    )


# ---------------------------------------------------------------- by hand


def test_a_lone_prefill_worker_limits_the_rate_to_one_over_its_mean_time():
    """Decode is so slow to prefill that the best is the pool; chunks of 512, answers of one token."""
    fleet = make_fleet(prefill=1, decode=20, remote=0)
    fleet = msgspec.structs.replace(fleet, hardware={**fleet.hardware, "d": _no_prefill(fleet)})
    fleet.clusters["pd"].workers["d"] = msgspec.structs.replace(
        fleet.clusters["pd"].workers["d"], hardware="d"
    )
    bound = fluid_bound(make_trace([1025, 2049], [1, 1]), fleet)
    assert bound.rate_per_s == pytest.approx(2 / (prefill_s(1024, 0) + prefill_s(2048, 0)), rel=1e-3)
    assert bound.binding == ("prefill seconds of pd/p",)
    assert bound.prices.prefill_second["pd/p"] == pytest.approx(1.0, rel=1e-3)


def _no_prefill(fleet: Fleet):
    """The near hardware with prefill 1e5 times slower."""
    linear = {name: v * (1e5 if name.startswith("prefill") else 1) for name, v in FAST.items()}
    return msgspec.structs.replace(fleet.hardware["near"], linear=linear)


def test_decode_alone_runs_full_batches_of_max_running():
    """Prefill is free beside it; 4 sequences of 10 steps from 64 tokens on share each step."""
    bound = fluid_bound(make_trace([65], [10]), make_fleet(prefill=500, decode=1))
    contexts = [64 + t for t in range(10)]
    per_request = sum(step_s([c] * 4) for c in contexts) / 4
    assert bound.rate_per_s == pytest.approx(1 / per_request, rel=1e-6)
    assert set(bound.binding) == {"decode seconds of pd/d", "decode slots of pd/d"}


def test_pages_limit_the_batch_where_they_are_fewer_than_slots():
    """The pool holds 4 pages of 64; a sequence of 64 … 73 tokens holds 1 page in one step and 2 in nine."""
    fleet = make_fleet(prefill=500, decode=1, max_running=100, kv_tokens=256)
    bound = fluid_bound(make_trace([65], [10]), fleet)
    steps = (1 + 9 * 2) / 4
    own_s = 10 * FAST["decode_sequence_s"] + sum(64 + t for t in range(10)) * FAST["decode_context_s"]
    assert bound.rate_per_s == pytest.approx(1 / (steps * FAST["decode_base_s"] + own_s), rel=1e-6)
    assert "KV pages of pd/d" in bound.binding


def test_the_link_limits_what_can_only_be_prefilled_remotely():
    fleet = make_fleet(prefill=0, decode=50, remote=500, link="8Mbit", state_bytes=20_000)
    fleet = msgspec.structs.replace(fleet, hardware={**fleet.hardware, "near": _no_prefill(fleet)})
    bound = fluid_bound(make_trace([1001], [1]), fleet)
    by_link = 1e6 / (16 * 64 * KV_BYTES + 20_000)  # 1,000 tokens are 16 pages
    assert bound.rate_per_s == pytest.approx(
        by_link, rel=0.02
    )  # the rest is prefilled at 1e5 times the price
    assert bound.binding[0] == "link far->pd"
    assert bound.prices.link_byte["far->pd"] == pytest.approx(1e-6, rel=0.02)


def test_a_link_counts_with_the_most_it_ever_has():
    fleet = make_fleet(prefill=0, decode=5, remote=50, link="8Mbit")
    trace = make_trace([1001], [1])
    more = msgspec.structs.replace(
        fleet, schedule=[ScheduledChange(at=1.0, link="wan", capacity="0"), _capacity("24Mbit")]
    )
    less = msgspec.structs.replace(fleet, schedule=[_capacity("1Mbit")])
    at_24 = fluid_bound(trace, make_fleet(prefill=0, decode=5, remote=50, link="24Mbit")).rate_per_s
    assert fluid_bound(trace, more).rate_per_s == pytest.approx(at_24)
    assert fluid_bound(trace, less).rate_per_s == pytest.approx(fluid_bound(trace, fleet).rate_per_s)


def _capacity(text: str) -> ScheduledChange:
    return ScheduledChange(at=2.0, link="wan", capacity=text)


def test_a_prompt_that_fits_nowhere_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"request 1 of 5,000 prompt tokens fits no decode"):
        fluid_bound(make_trace([100, 5000], [1, 1]), make_fleet(kv_tokens=4096))


def test_a_fleet_without_decode_workers_is_refused():
    with pytest.raises(ConfigError, match="no decode worker"):
        fluid_bound(make_trace([100], [1]), make_fleet(decode=0))


# ---------------------------------------------------------------- every assignment of small cases


@cache
def least_decode(jobs, linear, max_running, pages, page_size, area) -> float:
    """Least seconds (page-seconds: `area`) to decode `jobs` and run their local chunks, over all schedules.

    A job is (context, steps, local chunk seconds, blocks of its prompt). Any subset may step together that
    keeps to slots and pages (shared prefix pages once); any one chunk may ride on a step, whoever's it is.
    """
    linear = dict(linear)
    saving = min(linear["prefill_base_s"], linear["decode_base_s"])
    chunks = tuple(sorted((c for job in jobs for c in job[2]), reverse=True))

    def held(chosen: dict[int, int]) -> int:
        blocks = {block for index in chosen for block in jobs[index][3]}
        own = [-(-(jobs[i][0] + done) // page_size) - len(jobs[i][3]) for i, done in chosen.items()]
        return sum(own) + len(blocks)

    @cache
    def least(left: tuple[int, ...], chunks_left: int) -> float:
        if not any(left) and not chunks_left:
            return 0.0
        best = float("inf")
        for chosen in product(*[(0, 1) if n else (0,) for n in left]):
            index = {i: jobs[i][1] - left[i] for i, c in enumerate(chosen) if c}
            if len(index) > max_running or held(index) > pages:
                continue
            after = tuple(n - c for n, c in zip(left, chosen, strict=True))
            alone = step_s([jobs[i][0] + done for i, done in index.items()], linear) if index else 0.0
            per_second = held(index) if area else 1.0
            if index:
                best = min(best, alone * per_second + least(after, chunks_left))
            if chunks_left:
                step = alone + chunks[chunks_left - 1] - (saving if index else 0.0)
                best = min(best, step * per_second + least(after, chunks_left - 1))
        return best

    return least(tuple(job[1] for job in jobs), len(chunks))


def least_makespan_s(trace: Trace, fleet: Fleet) -> float:
    """Over every assignment of requests to (decode worker, site): the busiest worker's or link's time.

    Prompts pin their pages on the decode worker while they are prefilled elsewhere.
    """
    near = fleet.hardware["near"]
    pd, max_running = fleet.clusters["pd"].workers, fleet.clusters["pd"].workers["d"].max_running
    decodes = [("d", i) for i in range(pd["d"].count)]
    sites = [("local", 0)] + [("p", i) for i in range(pd["p"].count if "p" in pd else 0)]
    if "far" in fleet.clusters:
        sites += [("t", i) for i in range(fleet.clusters["far"].workers["t"].count)]
    link_bytes_s = float(fleet.links["wan"].capacity) if fleet.links else 1.0
    pages = near.kv_tokens // fleet.page_size
    cached = naive_seen_before(trace)
    best = float("inf")
    for ways in product(product(decodes, sites), repeat=len(trace)):
        busy, waiting, jobs = {"link": 0.0}, {}, {}
        for i, (decode, site) in enumerate(ways):
            held = int(trace.prompt_tokens[i]) - 1
            new, chunks = held - cached[i], ()
            if site[0] == "local":
                chunks = _chunk_times(new, cached[i], near)
                wait_s = sum(chunks)
            else:
                hardware = fleet.hardware["far" if site[0] == "t" else "near"]
                wait_s = prefill_s(new, cached[i], hardware.linear, hardware.chunk_tokens)
                busy[site] = busy.get(site, 0.0) + wait_s
            if site[0] == "t":
                pages_sent = -(-held // fleet.page_size) - cached[i] // fleet.page_size
                sent_s = (pages_sent * 64 * KV_BYTES + fleet.model.state_bytes) / link_bytes_s
                busy["link"] += sent_s
                wait_s = max(wait_s, sent_s)
            own_pages = -(-held // fleet.page_size) - cached[i] // fleet.page_size
            waiting[decode] = waiting.get(decode, 0.0) + own_pages * wait_s
            job = (held, int(trace.output_tokens[i]), chunks, trace.block_hashes(i))
            jobs[decode] = (*jobs.get(decode, ()), job)
        worst = max(busy.values())
        for decode, mine in jobs.items():
            if worst >= best:
                break
            common = (mine, tuple(near.linear.items()), max_running, pages, fleet.page_size)
            steps_only = (tuple((*job[:2], (), job[3]) for job in mine), *common[1:])
            area = waiting[decode] + least_decode(*steps_only, True)
            worst = max(worst, least_decode(*common, False), area / pages)
        best = min(best, worst)
    return best


def _chunk_times(new, cached, hardware) -> tuple[float, ...]:
    found = []
    while new > 0:
        n = min(new, hardware.chunk_tokens)
        found.append(prefill_s(n, cached, hardware.linear, hardware.chunk_tokens))
        new, cached = new - n, cached + n
    return tuple(found)


@st.composite
def small_cases(draw):
    count = draw(st.integers(1, 3))
    prompts = draw(st.lists(st.integers(2, 400), min_size=count, max_size=count))
    outputs = draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    shared = draw(st.integers(0, 6))
    chains = []
    for i, prompt in enumerate(prompts):
        full = (prompt - 1) // 64
        chains.append([b if b < shared else 1000 * (i + 1) + b for b in range(full)])
    fleet = make_fleet(
        prefill=draw(st.integers(0, 1)),
        decode=draw(st.integers(1, 2)),
        remote=draw(st.integers(0, 1)),
        max_running=draw(st.integers(1, 3)),
        kv_tokens=draw(st.sampled_from([512, 640, 1024])),
        link=draw(st.sampled_from(["1Mbit", "20Mbit", "1Gbit"])),
        chunk_tokens=128,
        local=draw(st.sampled_from([FAST, SLOW])),
        state_bytes=draw(st.sampled_from([0, 50_000])),
    )
    return make_trace(prompts, outputs, chains), fleet


@settings(max_examples=80, deadline=None)
@given(small_cases())
def test_no_assignment_and_schedule_of_a_small_case_beats_the_bound(case):
    trace, fleet = case
    bound = fluid_bound(trace, fleet)
    assert len(trace) / least_makespan_s(trace, fleet) <= bound.rate_per_s * (1 + 1e-6)


def test_the_bound_is_reached_where_assignments_divide_evenly():
    """Four equal requests on two decode and two prefill workers that have nothing else to do."""
    fleet = make_fleet(prefill=2, decode=2, max_running=2, chunk_tokens=128, local=FAST)
    trace = make_trace([129, 129, 129, 129], [3, 3, 3, 3])
    best = len(trace) / least_makespan_s(trace, fleet)
    bound = fluid_bound(trace, fleet).rate_per_s
    assert best <= bound <= 1.03 * best


# ---------------------------------------------------------------- what it is made of


def naive_seen_before(trace: Trace) -> list[int]:
    seen: set[int] = set()
    found = []
    for i in range(len(trace)):
        hit = 0
        for block in trace.block_hashes(i):
            if block not in seen:
                break
            hit += 1
        found.append(hit * trace.block_tokens)
        seen.update(trace.block_hashes(i))
    return found


@given(
    st.lists(st.tuples(st.integers(2, 600), st.integers(0, 8), st.integers(0, 3)), min_size=1, max_size=12)
)
def test_the_best_cached_prefix_is_the_longest_run_of_blocks_that_came_before(rows):
    ids: dict[tuple[int, ...], int] = {}
    chains = []
    for prompt, shared, tail in rows:
        content = [0 if depth < shared else tail for depth in range((prompt + 63) // 64)]
        chains.append([ids.setdefault(tuple(content[: d + 1]), len(ids)) for d in range(len(content))])
    trace = make_trace([p for p, _, _ in rows], [1] * len(rows), chains)
    assert seen_before(trace).tolist() == naive_seen_before(trace)


@given(st.integers(2, 500), st.integers(1, 300), st.sampled_from([1, 16, 64]))
def test_page_and_context_sums_count_every_step(prompt, output, page):
    fleet = make_fleet(page_size=page)
    needs = least_needs(make_trace([prompt], [output]), fleet.model, page, places(fleet))
    held = [prompt - 1 + t for t in range(output)]
    assert needs.page_steps[0] == sum(-(-tokens // page) for tokens in held)
    assert needs.context_steps[0] == sum(held)


def mixed_trace(count: int = 300) -> Trace:
    rng = np.random.default_rng(5)
    prompts = np.clip(np.exp(rng.normal(6.5, 1.2, count)), 2, 20_000).astype(int)
    return make_trace(prompts.tolist(), rng.integers(1, 25, count).tolist())


MIXED_FLEET = make_fleet(prefill=2, decode=3, remote=2, link="20Mbit", local=SLOW, max_running=8)


def test_the_first_part_only_fills_the_caches():
    trace = make_trace([257, 257], [1, 1], [[1, 2, 3, 4], [1, 2, 3, 4]])
    fleet = make_fleet()
    warm = fluid_bound(trace, fleet, first=1).rate_per_s
    cold = fluid_bound(trace.part(1, 2), fleet).rate_per_s
    nothing_new = fluid_bound(make_trace([2], [1]), fleet)
    assert cold < warm < nothing_new.rate_per_s


def test_a_sample_in_the_program_never_makes_the_bound_lower_and_hardly_higher():
    exact = fluid_bound(mixed_trace(), MIXED_FLEET).rate_per_s
    sampled = fluid_bound(mixed_trace(), MIXED_FLEET, sample=60).rate_per_s
    assert exact * (1 - 1e-9) <= sampled <= 1.03 * exact


@pytest.mark.parametrize("group", ["p", "d", "t"])
def test_a_workers_price_is_what_the_bound_loses_without_a_bit_of_it(group):
    """Workers come whole, so the fleet is scaled up by 50 and one of 50 · n is taken away."""
    counts = {"p": 2 * 50, "d": 3 * 50, "t": 2 * 50}

    def rate(change: dict[str, int]) -> tuple[float, dict[str, float]]:
        n = {name: count + change.get(name, 0) for name, count in counts.items()}
        fleet = make_fleet(
            prefill=n["p"], decode=n["d"], remote=n["t"], link="1000Mbit", local=SLOW, max_running=8
        )
        bound = fluid_bound(mixed_trace(), fleet)
        worth = {r.place.split("/")[-1]: 0.0 for r in bound.resources}
        for r in bound.resources:
            if r.kind in ("prefill", "decode", "page_seconds"):
                pages = 100_000 // 64 if r.kind == "page_seconds" else 1
                worth[r.place.split("/")[-1]] += r.price * pages
        return bound.rate_per_s, worth

    now, worth = rate({})
    lost = (now - rate({group: -1})[0]) / now
    assert lost == pytest.approx(worth[group], rel=0.05, abs=1e-5)


def test_the_links_price_is_what_the_bound_loses_per_byte():
    def bound(rate: float):
        fleet = make_fleet(prefill=2, decode=3, remote=2, local=SLOW, max_running=8)
        link = msgspec.structs.replace(fleet.links["wan"], capacity=Rate(rate))
        return fluid_bound(mixed_trace(), msgspec.structs.replace(fleet, links={"wan": link}))

    now, less = bound(0.5e6), bound(0.49e6)
    lost = (now.rate_per_s - less.rate_per_s) / now.rate_per_s / 0.01e6
    assert now.prices.link_byte["far->pd"] > 0
    assert lost == pytest.approx(now.prices.link_byte["far->pd"], rel=0.05)


def test_prices_of_what_there_is_in_a_second_add_up_to_one():
    bound = fluid_bound(mixed_trace(), MIXED_FLEET)
    counts = {"pd/p": 2, "pd/d": 3, "far/t": 2}
    total = 0.0
    for resource in bound.resources:
        if resource.kind in ("prefill", "decode"):
            total += resource.price * counts[resource.place]
        elif resource.kind == "page_seconds":
            total += resource.price * counts[resource.place] * (100_000 // 64)
        elif resource.kind == "link":
            total += resource.price * 2.5e6
    assert total == pytest.approx(1.0, rel=1e-6)
    assert sum(
        r.weight for r in bound.resources if r.kind in ("prefill", "decode", "page_seconds", "link")
    ) == (pytest.approx(1.0, rel=1e-3))


def test_the_published_prices_alone_prove_the_bound():
    """Each request on its cheapest way, by the formula of docs/bound.md; 1 / mean is the rate."""
    trace, fleet = mixed_trace(), MIXED_FLEET
    bound = fluid_bound(trace, fleet)
    prices, pay = bound.prices, bound.prices.decode["pd/d"]
    total = 0.0
    for prompt, output in zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True):
        held = [prompt - 1 + t for t in range(output)]
        pages = -(-(prompt - 1) // 64)
        sent = pages * 64 * KV_BYTES
        near_s, far_s = prefill_s(prompt - 1, 0, SLOW), prefill_s(prompt - 1, 0, FAST)
        saved_s = -(-(prompt - 1) // 512) * min(SLOW["prefill_base_s"], SLOW["decode_base_s"])
        decode = pay.sequence_step * output + pay.context_step * sum(held)
        decode += pay.page_step * sum(-(-tokens // 64) for tokens in held)
        ways = (
            pay.second * (near_s - saved_s) + pay.page_second * pages * near_s,
            prices.prefill_second["pd/p"] * near_s + pay.page_second * pages * near_s,
            prices.prefill_second["far/t"] * far_s
            + prices.link_byte["far->pd"] * sent
            + pay.page_second * pages * max(far_s, sent / 2.5e6),
        )
        total += decode + min(ways)
    assert len(trace) / total == pytest.approx(bound.rate_per_s, rel=1e-6)


def test_free_roles_bound_every_split_of_the_same_workers():
    """Of 5 workers alike, whatever number prefills."""
    trace = mixed_trace()
    free = fluid_bound(trace, make_fleet(prefill=2, decode=3), free_roles=True).rate_per_s
    for prefill in range(5):
        assert fluid_bound(trace, make_fleet(prefill=prefill, decode=5 - prefill)).rate_per_s <= free * (
            1 + 1e-6
        )


def test_time_scaling_of_arrivals_does_not_change_the_bound():
    trace = mixed_trace()
    assert fluid_bound(replace(trace, arrival_s=trace.arrival_s * 7), MIXED_FLEET) == fluid_bound(
        trace, MIXED_FLEET
    )
