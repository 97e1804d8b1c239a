from __future__ import annotations

import numpy as np
import pytest
from placements import Chooser, Row, candidates, request, view

from policies.congestion import BOUND, CongestionFactor, Pressure
from policies.dual_timescale import DualTimescale
from policies.length_window import LengthWindow
from policies.role_controller import Demand, RoleController
from policies.stage_meter import StageMeter
from policies.threshold_solver import Capacity, Samples, ThresholdProblem
from policies.types import Candidates, Command, FleetView, Outcome, PlacementKind

CALM = Pressure(0.0, 0.0, 0.0)


def offer(
    prompt: int, home_cached: int = 0, away_cached: int = 0, token_bytes: int = 100, **fields: float
) -> Candidates:
    """One prefill worker on each side: 1 ms per token at home, 0.5 ms away."""
    home, away = prompt - 1 - home_cached, prompt - 1 - away_cached
    return candidates(
        Row("d0", prefill_s=9e9),
        Row("d0 p0", cached=home_cached, prefill_s=home * 1e-3, **fields),
        Row("d0 r0", cached=away_cached, prefill_s=away * 5e-4, kv_bytes=prompt * token_bytes),
        prompt=prompt,
    )


def small_fleet(now_s: float = 0.0, **values: object) -> FleetView:
    return view(2, 2, 2, now_s=now_s, **values)


def trained(policy: DualTimescale, token_bytes: int = 100, seen: FleetView | None = None) -> Chooser:
    """After 200 prompts of 101, 201, … 10,001 tokens twice, and a solution."""
    choose = Chooser(policy)
    for i in range(200):
        tokens = 101 + 100 * (i % 100)
        choose(offer(tokens, token_bytes=token_bytes), asked=request(f"r{i}", prompt=tokens))
    policy.control(seen or small_fleet(), 0.0)
    return choose


# ---------------------------------------------------------------- per request


def test_until_there_are_samples_the_least_ttft_decides_or_a_given_threshold() -> None:
    assert Chooser(DualTimescale())(offer(1000)) == "d0 r0"
    assert Chooser(DualTimescale(tokens=2000))(offer(1000)) == "d0 p0"


def test_the_threshold_is_solved_from_what_both_sides_would_cost() -> None:
    """Two workers on each side, equally likely lengths 0 … 10,000, twice as quick away: 2·∫₀ᵗ l = ∫ₜ l, so
    3 t² = 10,000², t = 5774."""
    policy = DualTimescale(convert=False)
    choose = trained(policy)
    assert policy.threshold_tokens == pytest.approx(5774, rel=0.02)
    assert choose(offer(5000), asked=request(prompt=5000)) == "d0 p0"
    assert choose(offer(6000), asked=request(prompt=6000)) == "d0 r0"


def test_samples_are_counterfactual_so_the_solution_does_not_feed_on_its_own_choices() -> None:
    one, other = DualTimescale(tokens=0, convert=False), DualTimescale(tokens=10**6, convert=False)
    assert trained(one).policy.threshold_tokens == trained(other).policy.threshold_tokens


def test_a_thin_link_raises_the_threshold_and_makes_bandwidth_scarce() -> None:
    wide, thin = DualTimescale(convert=False), DualTimescale(convert=False)
    trained(wide)
    trained(thin, seen=small_fleet(link_bytes_per_s={"far->pd": 1e5}))
    assert not wide.bandwidth_scarce
    assert thin.bandwidth_scarce
    assert thin.threshold_tokens > 1.3 * wide.threshold_tokens


def test_scarce_bandwidth_judges_the_pd_clusters_cache_alone() -> None:
    choose = trained(DualTimescale(convert=False), seen=small_fleet(link_bytes_per_s={"far->pd": 1e5}))
    asked = request(prompt=10_000)
    assert choose(offer(10_000, away_cached=9000), asked=asked) == "d0 r0"
    assert choose(offer(10_000, home_cached=9000), asked=asked) == "d0 p0"


def test_abundant_bandwidth_counts_the_longer_prefix_and_then_seconds_decide() -> None:
    choose = trained(DualTimescale(convert=False))
    asked = request(prompt=10_000)
    assert choose(offer(10_000, away_cached=9000), asked=asked) == "d0 r0"
    assert choose(offer(10_000, home_cached=9000, start_s=50.0), asked=asked) == "d0 p0"
    # Only the far cluster has the prefix. Home would compute 9,999 tokens in 10 s, but far is busy for 60.
    busy = candidates(
        Row("d0 p0", prefill_s=10.0), Row("d0 r0", cached=9000, start_s=60.0, prefill_s=0.5), prompt=10_000
    )
    assert choose(busy, asked=asked) == "d0 p0"


def test_a_decode_worker_prefills_only_what_its_cache_makes_shorter() -> None:
    choose = trained(DualTimescale(convert=False))
    rows = candidates(
        Row("d0", cached=900, prefill_s=0.1), Row("d0 p0", prefill_s=0.9), Row("d0 r0", prefill_s=0.5)
    )
    assert choose(rows) == "d0"
    idle = candidates(Row("d0", prefill_s=0.1), Row("d0 p0", prefill_s=0.9), Row("d0 r0", prefill_s=0.5))
    assert choose(idle) == "d0 p0"


def test_one_side_alone_gets_everything() -> None:
    choose = trained(DualTimescale(convert=False))
    assert choose(candidates(Row("d0"), Row("d0 p0", prefill_s=0.5)), asked=request(prompt=99_999)) == "d0 p0"
    assert choose(candidates(Row("d0 r0")), asked=request(prompt=10)) == "d0 r0"


@pytest.mark.parametrize(
    "wrong", [{"tokens": -1}, {"window": 3}, {"solve_every_s": -1.0}, {"tpot_s": 0.0}], ids=str
)
def test_parameters_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        DualTimescale(**wrong)


# ---------------------------------------------------------------- window


def test_the_window_keeps_the_last_requests() -> None:
    window = LengthWindow(3)
    for tokens in range(5):
        window.add(
            home_tokens=tokens, away_tokens=1, home_s=0.0, away_s=0.0, kv_bytes=0.0, cached_tokens=2 * tokens
        )
    assert len(window) == 3
    assert sorted(window.samples(scarce=True).length_tokens) == [2, 3, 4]
    assert sorted(window.samples(scarce=False).length_tokens) == [1, 1, 1]
    assert window.reuse() == 2.0


# ---------------------------------------------------------------- congestion


def test_congestion_of_the_link_starts_at_the_high_mark_and_ends_at_the_low_one() -> None:
    factor = CongestionFactor(high=0.9, low=0.7)
    utilisations = [0.8, 0.95, 0.8, 0.65, 0.8]
    assert [factor.update(Pressure(0, 0, used)) for used in utilisations] == [1, 1.25, 1.25, 1, 1]


def test_uneven_queues_correct_from_the_high_mark_on_until_the_low_one() -> None:
    factor = CongestionFactor(queue_high=0.5, queue_low=0.1)
    ahead = [0.4, 0.6, 0.4, 0.05, 0.4]
    assert [factor.update(Pressure(a, 0, 0)) > 1 for a in ahead] == [False, True, True, False, False]


@pytest.mark.parametrize("ahead", [1.0, 3.0])
def test_the_longer_queue_gets_less_alike_on_both_sides(ahead: float) -> None:
    away, home = CongestionFactor(), CongestionFactor()
    more, less = away.update(Pressure(ahead, 0, 0)), home.update(Pressure(0, ahead, 0))
    assert more == pytest.approx(1 / less)
    assert 1 < more < BOUND or more == pytest.approx(BOUND)


def test_the_correction_follows_the_queues_and_does_not_add_up() -> None:
    factor = CongestionFactor()
    first = factor.update(Pressure(2.0, 0, 0))
    assert [factor.update(Pressure(2.0, 0, 0)) for _ in range(100)] == [first] * 100
    assert factor.update(CALM) == 1.0
    assert factor.update(Pressure(100.0, 0, 0)) == pytest.approx(BOUND)


def test_a_congested_link_keeps_requests_at_home_even_if_home_queues() -> None:
    assert CongestionFactor().update(Pressure(0.0, 9.0, 1.0)) > 1


def test_link_congestion_moves_the_threshold_that_decides() -> None:
    policy = DualTimescale(convert=False, solve_every_s=1000)
    choose = trained(policy)
    assert choose(offer(6000), asked=request(prompt=6000)) == "d0 r0"
    policy.control(small_fleet(now_s=1.0, link_utilisation={"far->pd": 1.0}), 1.0)
    assert policy.threshold_tokens == pytest.approx(5774 * 1.25, rel=0.02)
    assert choose(offer(6000), asked=request(prompt=6000)) == "d0 p0"


# ---------------------------------------------------------------- stages


def run(meter: StageMeter, seconds: int, arrivals: int, answers: int, seen: FleetView) -> None:
    for _ in range(seconds):
        for _ in range(arrivals):
            meter.arrived()
        for _ in range(answers):
            meter.finished()
        meter.tick(seen, 1.0)


def test_an_answers_length_is_tokens_generated_over_answers_finished() -> None:
    """Two workers with batches of 10 at 20 ms make 1,000 tokens a second; 4 answers of 250 end."""
    meter = StageMeter()
    run(meter, 600, arrivals=5, answers=4, seen=view(2, 0, 0, running={"d0": 10, "d1": 10}))
    assert meter.answer_tokens == pytest.approx(250, rel=0.02)
    assert meter.arrival_rate == pytest.approx(5, rel=0.02)


def test_stages_count_ready_workers_links_and_the_decode_rate_of_full_batches() -> None:
    """Full batches of 20 at 20 ms make 1,000 tokens a second: 4 answers of 250."""
    meter = StageMeter()
    seen = view(3, 2, 2, running={"d0": 10, "d1": 10}, ready={"d2": False, "p1": False})
    run(meter, 600, arrivals=5, answers=4, seen=seen)
    stages = meter.stages(seen)
    assert stages.decodes == ("d0", "d1")
    assert stages.prefills == ("p0",)
    assert stages.remotes == ("r0", "r1")
    assert stages.capacity.away_workers == 2
    assert stages.capacity.link_bytes_per_s == 1e9
    assert stages.capacity.decode_rate == pytest.approx(4, rel=0.02)


def test_pages_and_step_time_bound_the_batch() -> None:
    """10 sequences of 4,000 tokens fit 4 into 16,000 tokens of pages."""
    full = view(1, 0, 0, running={"d0": 10}, running_context_tokens={"d0": 40_000})
    meter = StageMeter()
    run(meter, 600, 4, 4, full)
    assert meter.stages(full).capacity.decode_rate == pytest.approx(4 / (0.02 * meter.answer_tokens))
    slow = view(1, 0, 0, running={"d0": 4}, decode_sequence_s={"d0": 0.002})
    strict = StageMeter(tpot_s=0.040)
    run(strict, 600, 4, 4, slow)
    # 20 sequences would take 60 ms, 15 take 50, 11 take 42, 8 take 36.
    assert strict.stages(slow).capacity.decode_rate == pytest.approx(8 / (0.036 * strict.answer_tokens))


# ---------------------------------------------------------------- roles


def roles_problem(decode_rate: float) -> ThresholdProblem:
    """No remote help: a prefill worker serves one request per second, a decode worker `decode_rate`."""
    one = np.ones(10)
    return ThresholdProblem(Samples(np.arange(10), one, one, one), Capacity(0, 0.0, decode_rate))


PREFILLS, DECODES = ("p0", "p1"), ("d0", "d1", "d2", "d3")


def test_the_scarcer_stage_gets_a_worker() -> None:
    """2 prefill workers serve 2/s, 4 decode workers 8/s: with demand for 4/s a third prefill worker pays."""
    busy = view(4, 2, 0, running={"d0": 5, "d1": 5, "d3": 5})
    order = RoleController().decide(roles_problem(2.0), PREFILLS, DECODES, Demand(4.0, 0.0, 10.0), busy)
    assert order == ("d2", "prefill")
    # 4 decode workers serve 0.8/s, 2 prefill workers 2/s: 5 and 1 serve 1/s.
    queued = view(4, 2, 0, prefill_ends_s={"p0": 3.0})
    order = RoleController().decide(roles_problem(0.2), PREFILLS, DECODES, Demand(4.0, 0.0, 10.0), queued)
    assert order == ("p1", "decode")


def test_no_worker_moves_without_demand_or_without_gain() -> None:
    calm = view(4, 2, 0)
    little = Demand(1.0, 0.0, 10.0)
    assert RoleController().decide(roles_problem(2.0), PREFILLS, DECODES, little, calm) is None
    # 2 and 4 at 0.5: balanced.
    assert RoleController().decide(roles_problem(0.5), PREFILLS, DECODES, Demand(9.0, 0, 1), calm) is None


def test_a_conversion_that_costs_more_than_it_gains_within_the_horizon_is_left() -> None:
    """One more prefill worker gains 1/s. Losing a quarter of a well used cache for 30 s costs
    2/4 · 4 · 30 = 60 requests: worth it within 300 s, not within 30 s."""
    demand, calm = Demand(9.0, 4.0, 0.0), view(4, 2, 0)
    problem = roles_problem(2.0)
    assert RoleController(horizon_s=300).decide(problem, PREFILLS, DECODES, demand, calm) is not None
    assert RoleController(horizon_s=30).decide(problem, PREFILLS, DECODES, demand, calm) is None


def test_one_worker_of_each_role_stays() -> None:
    demand = Demand(9.0, 0.0, 0.0)
    assert RoleController().decide(roles_problem(9.0), ("p0",), ("d0",), demand, view(1, 1, 0)) is None


def test_one_conversion_at_a_time_and_a_pause_after_it() -> None:
    controller, problem, demand = RoleController(cooldown_s=60), roles_problem(2.0), Demand(9.0, 0.0, 0.0)

    def decide(now_s: float, **values: object) -> tuple[str, str] | None:
        return controller.decide(problem, PREFILLS, DECODES, demand, view(4, 2, 0, now_s=now_s, **values))

    assert decide(0.0) == ("d0", "prefill")
    assert decide(100.0) is None, "d0 has not changed yet"
    assert decide(101.0, role={"d0": "prefill"}, ready={"d0": False}) is None, "it is not ready yet"
    assert decide(102.0, role={"d0": "prefill"}) is not None
    assert decide(130.0, role={"d0": "prefill", "d1": "prefill"}) is None, "too soon"
    assert decide(170.0, role={"d0": "prefill", "d1": "prefill"}) is not None


def test_an_order_that_nobody_carries_out_is_given_up() -> None:
    controller, problem, demand = RoleController(), roles_problem(2.0), Demand(9.0, 0.0, 0.0)
    assert controller.decide(problem, PREFILLS, DECODES, demand, view(4, 2, 0)) is not None
    assert controller.decide(problem, PREFILLS, DECODES, demand, view(4, 2, 0, now_s=599.0)) is None
    assert controller.decide(problem, PREFILLS, DECODES, demand, view(4, 2, 0, now_s=601.0)) is not None


def test_the_policy_orders_a_conversion_through_its_commands() -> None:
    """20 requests per second arrive, home can prefill far less, and decode is idle."""
    policy = DualTimescale(window=200)
    choose = Chooser(policy)
    commands: list[Command] = []
    for second in range(150):
        seen = view(4, 1, 1, now_s=float(second), running={"d0": 1, "d1": 1, "d2": 1})
        for i in range(20):
            tokens = 1000 + 200 * i
            choose(offer(tokens), asked=request(f"{second}-{i}", prompt=tokens))
            policy.observe(Outcome(f"{second}-{i}", PlacementKind.POOL, "p0", "d0", 1.0, 1.0, ok=True))
        commands += policy.control(seen, float(second))
    assert commands == [Command("set_role", {"worker": "d3", "role": "prefill"})]
    assert policy.control(view(4, 1, 1, now_s=151.0), 151.0) == []
