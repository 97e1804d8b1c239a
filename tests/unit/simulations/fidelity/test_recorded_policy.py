"""The recorded policy repeats placements, and says where it could not."""

from __future__ import annotations

from pathlib import Path

from simulated_recordings import fleet, journal, trace

from policies.cost_model import CostModel
from simulations.engine.run import simulate
from simulations.fidelity.recorded_policy import RecordedPolicy
from simulations.fidelity.recording import read_recording
from simulations.fidelity.replayed import replay_rows


def test_every_placement_is_repeated() -> None:
    requests = trace(40)
    once = simulate(requests, fleet(), CostModel())
    choices = {
        str(i): (once.workers[once.decode[i]], once.workers[once.site[i]]) for i in range(len(requests))
    }
    shifted = {name: (("decode-0", "prefill") if int(name) % 2 else pair) for name, pair in choices.items()}
    policy = RecordedPolicy(shifted)
    again = simulate(requests, fleet(), policy)
    placed = {str(i): (again.workers[again.decode[i]], again.workers[again.site[i]]) for i in range(40)}
    assert placed == shifted
    assert policy.missed == 0


def test_an_impossible_placement_falls_back_on_least_cost_and_is_counted() -> None:
    policy = RecordedPolicy({str(i): ("decode-7", "remote") for i in range(10)})
    result = simulate(trace(10), fleet(), policy)
    assert policy.missed == 10
    assert (result.state == 0).all()


def test_a_followed_replay_is_placed_as_recorded(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(journal(policy="round_robin"))
    recording = read_recording(path)
    rows = replay_rows(recording, fleet(), follow=True)
    assert [(row.decode, row.site) for row in rows] == [(row.decode, row.site) for row in recording.rows]
    shorter = replay_rows(recording, fleet(), follow=True, first=7)
    assert [row.request_id for row in shorter] == [row.request_id for row in recording.rows[:7]]
