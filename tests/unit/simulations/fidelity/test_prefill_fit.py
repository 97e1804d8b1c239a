"""Prefill coefficients come out of recorded prefills, and workers learn from each other."""

from __future__ import annotations

import pytest

from prfaas.engine.interface import StepProfile
from prfaas.protocol.messages import PrefillReport
from simulations.fidelity.activity import Activity
from simulations.fidelity.prefill_fit import fit_prefills, prefill_prior, prefills, without_decodes
from simulations.fidelity.recording import Row
from simulations.fidelity.step_fit import Coefficients, Sample, alone, fit_steps
from simulations.fleet import HardwareSpec, MachineSpec
from simulations.hardware.profiles import step_times

PROFILE = StepProfile(128, 0.1, 0.002, 1e-6, 0.05, 0.01, 1e-4)
LENGTHS = [(20, 0), (60, 1000), (128, 500), (500, 30), (900, 0), (30, 700), (300, 300), (1100, 16)]


def prompt(begin_s: float, new: int, cached: int, prefill_s: float, site: str = "p") -> Row:
    return Row(
        request_id=str(begin_s),
        arrival_s=begin_s,
        prompt_tokens=new + cached + 1,
        max_tokens=8,
        decode="d",
        site=site,
        report=PrefillReport(
            site=site, cached_tokens=cached, decode_cached_tokens=0, computed_tokens=new,
            queue_s=0.0, prefill_s=prefill_s, ready_s=prefill_s,
        ),
        ttft_s=prefill_s + 0.1,
        end_s=prefill_s + 0.1,
        completion_tokens=1,
    )  # fmt: skip


def seconds(true: Coefficients, new: int, cached: int) -> float:
    base_s, token_s, context_s, read_s = true
    done, total = 0, 0.0
    while done < new:
        chunk = min(128, new - done)
        before = cached + done
        total += base_s + chunk * token_s + chunk * (before + chunk / 2) * context_s + before * read_s
        done += chunk
    return total


def prompts(true: Coefficients) -> list[Row]:
    return [
        prompt(100.0 * number, new, cached, seconds(true, new, cached))
        for number, (new, cached) in enumerate(LENGTHS * 3)
    ]


def fitted(rows: list[Row], *workers: str) -> list[Coefficients]:
    samples = [alone(without_decodes(prefills(w, rows, 128), PROFILE, (0, 0, 0)), None) for w in workers]
    return fit_prefills([prefill_prior(PROFILE)] * len(workers), [128] * len(workers), samples)


@pytest.mark.parametrize(
    "true", [(0.2, 0.004, 1e-6, 1e-4), (0.05, 0.004, 0.0, 4e-4), (0.3, 0.002, 3e-6, 0.0)]
)
def test_what_prefills_take_is_found_again(true: Coefficients) -> None:
    rows = prompts(true)
    (found,) = fitted(rows, "p")
    for new, cached in ((10, 0), (40, 900), (600, 100), (1000, 0)):
        assert seconds(found, new, cached) == pytest.approx(seconds(true, new, cached), rel=0.1)


def test_a_worker_with_few_prompts_learns_from_the_others() -> None:
    true = (0.2, 0.004, 1e-6, 3e-4)
    rows = prompts(true)
    rows.append(prompt(1e5, 300, 0, 2 * seconds(true, 300, 0), "slow"))
    _, slow = fitted(rows, "p", "slow")
    assert seconds(slow, 30, 900) == pytest.approx(2 * seconds(true, 30, 900), rel=0.1)


def test_without_any_prompt_the_calibrated_profile_stays() -> None:
    assert fitted([], "p") == [prefill_prior(PROFILE)]


def test_the_read_of_a_chunk_is_as_the_simulator_takes_it() -> None:
    linear = {
        "prefill_base_s": 0.2, "prefill_token_s": 0.004, "prefill_context_s": 1e-6,
        "decode_base_s": 0.1, "decode_sequence_s": 0.0, "decode_context_s": 0.0,
    }  # fmt: skip
    spec = HardwareSpec(
        linear=linear, chunk_tokens=128, kv_tokens=4096, prefill_read_s=1.5e-4, prefill_scale=2.0
    )
    times = step_times(spec, "h")
    for new, cached in LENGTHS:
        true_s = seconds((0.2, 0.004, 1e-6, 1.5e-4), new, cached)
        assert times.prefill_s(new, cached) == pytest.approx(2 * true_s)
    assert times.prefill_s(300, 40) == pytest.approx(
        times.chunk_s(128, 40) + times.chunk_s(128, 168) + times.chunk_s(44, 296)
    )


def test_what_others_on_the_machine_added_is_taken_off() -> None:
    machine = MachineSpec(beside_prefill=0.5, beside_decode=0.1)
    slowed = Sample((1.0, 2.0), 1.6 * 10.0, (1.0, 1.0), extra_s=3.0)
    assert alone([slowed], machine)[0].seconds == pytest.approx(7.0)
    # However much else is said to have been in it, something is its own.
    assert alone([Sample((1.0, 2.0), 10.0, extra_s=99.0)], None)[0].seconds == pytest.approx(1.0)


def test_seconds_that_nothing_explains_leave_the_prior() -> None:
    samples = [Sample((1.0, 0.0), 1.0)]
    assert fit_steps(samples, (2.0, 3.0), [(1.0, 1.0)]) == (2.0, 3.0)


def test_who_did_what_beside_whom() -> None:
    rows = [prompt(0.0, 100, 0, 10.0), prompt(5.0, 100, 0, 10.0, "q")]
    rows[0].end_s = 10.1 + 20.0
    activity = Activity(rows)
    # `p` computes 0 … 10, `q` 5 … 15, `d` decodes from 10 on.
    assert activity.beside("q", 5.0, 15.0) == (pytest.approx(0.5), pytest.approx(0.5))
    assert activity.beside("d", 0.0, 10.0) == (pytest.approx(1.5), 0.0)
    assert activity.beside("p", 0.0, 10.0) == (pytest.approx(0.5), 0.0)
    assert activity.beside("p", 3.0, 3.0) == (0.0, 0.0)
