"""Calibration finds the truth again where it is known: in recordings made by the simulator."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import simulated_recordings
from click.testing import CliRunner, Result
from simulated_recordings import decision_log, fleet, journal, misjudged, on_one_machine

from launcher.cli import main
from prfaas.errors import ConfigError
from router.core.events import FirstToken, SchedulerInput
from simulations.fidelity.calibrate import calibrate
from simulations.fidelity.recording import read_decisions, read_recording, with_placements
from simulations.fidelity.replayed import replay_rows
from simulations.fidelity.terms import term_errors
from simulations.fleet import Fleet
from simulations.fleet_load import load_fleet


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.fixture(scope="module")
def true_journal() -> bytes:
    return journal()


def test_a_journal_tells_requests_workers_links_and_placements(tmp_path: Path, true_journal: bytes) -> None:
    recording = read_recording(write(tmp_path / "j", true_journal))
    trace = simulated_recordings.trace()
    assert recording.trace().prompt_tokens.tolist() == trace.prompt_tokens.tolist()
    # A journal that ends with the last decision does not tell the ends of the answers begun then.
    answered = [row.complete for row in recording.rows]
    assert sum(answered) > 50
    assert recording.trace().output_tokens[answered].tolist() == trace.output_tokens[answered].tolist()
    assert [recording.trace().block_hashes(i) for i in range(60)] == [
        trace.block_hashes(i) for i in range(60)
    ]
    assert {name: info.role for name, info in recording.workers.items()} == {
        "decode-0": "decode", "decode-1": "decode", "prefill": "prefill", "remote": "prefill",
    }  # fmt: skip
    assert [(link.name, link.capacity_bytes_per_s) for link in recording.links] == [("wan", 12.5e6)]
    assert all(row.decode.startswith("decode") and row.site for row in recording.rows)


def test_pages_that_an_answer_filled_are_named_by_the_next_turn(tmp_path: Path, true_journal: bytes) -> None:
    recording = read_recording(write(tmp_path / "j", true_journal))
    first, then = recording.rows[:2]
    first.blocks, first.prompt_tokens, first.end_s = (1, 2), 150, 0.0
    # The decode worker had three pages of this prompt; the third was in no prompt before.
    then.blocks, then.prompt_tokens = (1, 2, 3, 4), 300
    assert then.report is not None
    then.report = msgspec.structs.replace(then.report, decode_cached_tokens=3 * 64)
    trace = recording.trace()
    assert trace.prompt_tokens[:2].tolist() == [150, 300]
    assert {row: ids.tolist() for row, ids in trace.answers.items()} == {0: [3]}
    assert trace.session[:3].tolist() == [0, 0, -1]
    assert trace.think_s[1] == pytest.approx(then.arrival_s - first.arrival_s)
    # A turn that came before the answer's end waited for nobody.
    first.end_s = 1e3
    assert recording.trace().session[:2].tolist() == [-1, -1]


def test_jittered_arrivals_keep_their_order_and_are_late_by_a_step_at_most(
    tmp_path: Path, true_journal: bytes
) -> None:
    recording = read_recording(write(tmp_path / "j", true_journal))
    plain = replay_rows(recording, fleet(), follow=True)
    jittered = replay_rows(recording, fleet(), follow=True, jitter=1)
    late_s = [b.arrival_s - a.arrival_s for a, b in zip(plain, jittered, strict=True)]
    assert max(late_s) > 0.0
    assert all(0.0 <= late < 0.1 for late in late_s)
    assert sorted(row.arrival_s for row in jittered) == [row.arrival_s for row in jittered]
    assert replay_rows(recording, fleet(), follow=True, jitter=1) == jittered


def test_how_workers_of_one_machine_slow_each_other_is_found(tmp_path: Path) -> None:
    truth = on_one_machine(fleet(), beside_prefill=0.4)
    recording = read_recording(write(tmp_path / "j", journal(truth=truth, policy="round_robin")))
    found = calibrate(recording, 40, one_machine=True)
    assert found.machine is not None
    assert found.machine.beside_prefill == pytest.approx(0.4, abs=0.15)
    assert found.machine.beside_decode <= 0.1
    ignored = calibrate(recording, 40)
    assert ignored.machine is None

    def error(fleet: Fleet) -> float:
        rows = replay_rows(recording, fleet, follow=True)[40:]
        return term_errors(recording.rows[40:], rows)["prefill_s"].median_error

    assert error(found.fleet) < 0.7 * error(ignored.fleet)


def test_a_run_with_true_profiles_is_predicted_from_its_first_half(
    tmp_path: Path, true_journal: bytes
) -> None:
    recording = read_recording(write(tmp_path / "j", true_journal))
    found = calibrate(recording, 30)
    assert found.prefill_scale == pytest.approx(dict.fromkeys(recording.workers, 1.0), abs=0.02)
    for follow in (True, False):
        rows = replay_rows(recording, found.fleet, follow=follow)
        errors = term_errors(recording.rows[30:], rows[30:])
        assert abs(errors["ttft_s"].of_median) < 0.05
        assert abs(errors["ttft_s"].of_p90) < 0.05
        assert errors["tpot_s"].median_error < 0.02


def test_wrongly_calibrated_step_times_are_put_right(tmp_path: Path) -> None:
    recording = read_recording(write(tmp_path / "j", journal(misjudged(1.6), policy="round_robin")))
    found = calibrate(recording)
    for worker in ("decode-0", "decode-1", "prefill", "remote"):
        assert found.prefill_scale[worker] == pytest.approx(1 / 1.6, rel=0.05)
    rows = replay_rows(recording, found.fleet, follow=True)
    errors = term_errors(recording.rows, rows)
    assert errors["ttft_s"].median_error < 0.03
    assert errors["tpot_s"].median_error < 0.05
    # Without calibration the same replay would be far off.
    untouched = calibrate(recording, 4).fleet
    assert untouched != found.fleet


def test_seconds_per_request_are_found(tmp_path: Path) -> None:
    def later(item: SchedulerInput) -> SchedulerInput:
        return (
            msgspec.structs.replace(item, ttft_s=item.ttft_s + 0.2) if isinstance(item, FirstToken) else item
        )

    without = calibrate(read_recording(write(tmp_path / "a", journal())))
    found = calibrate(read_recording(write(tmp_path / "b", journal(later))))
    assert found.overhead_s - without.overhead_s == pytest.approx(0.2, abs=0.04)


def test_a_later_half_is_not_looked_at(tmp_path: Path, true_journal: bytes) -> None:
    recording = read_recording(write(tmp_path / "j", true_journal))
    before = calibrate(recording, 30)
    for row in recording.rows[30:]:
        row.ttft_s, row.end_s, row.completion_tokens = 99.0, 999.0, 3
    assert calibrate(recording, 30) == before


# ---------------------------------------------------------------- decision logs


def test_a_decision_log_alone_gives_rates_and_prefixes(tmp_path: Path, true_journal: bytes) -> None:
    rows = read_recording(write(tmp_path / "j", true_journal)).rows
    log = write(tmp_path / "d", decision_log(rows))
    assert [row.ttft_s for row in read_decisions(log)] == [row.ttft_s for row in rows]
    result = run("--decisions", str(log), "--check", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["requests"] == 60
    assert "guesses" in report["notes"][0]
    ttft = report["check"]["placed_as_recorded"]["ttft_s"]
    # Chunks, contexts and batches are guessed, so this is rough; the order of magnitude must be right.
    assert abs(ttft["error_of_median"]) < 0.5


def test_placements_of_the_decision_log_win_over_replayed_ones(tmp_path: Path, true_journal: bytes) -> None:
    recording = read_recording(write(tmp_path / "j", true_journal))
    decided = read_decisions(write(tmp_path / "d", decision_log(recording.rows)))
    decided[0].decode, decided[0].site, decided[0].kind = "decode-1", "remote", "remote"
    decided[1].decode = "unheard-of"
    kept = recording.rows[1].decode
    with_placements(recording, decided)
    first, second = recording.rows[:2]
    assert (first.decode, first.site, first.kind) == ("decode-1", "remote", "remote")
    assert second.decode == kept


# ---------------------------------------------------------------- the command


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", "calibrate", *arguments])


def test_the_fleet_that_is_written_can_be_simulated(tmp_path: Path, true_journal: bytes) -> None:
    log, out = write(tmp_path / "j", true_journal), tmp_path / "fleet.yaml"
    result = run("--journal", str(log), "--out", str(out), "--check")
    assert result.exit_code == 0, result.output
    assert "placed by policy" in result.output
    assert "ttft_s" in result.output
    fleet = load_fleet(out)
    assert set(fleet.hardware) == {"decode-0", "decode-1", "prefill", "remote"}
    assert fleet.clusters["pd"].kind == "pd"
    assert fleet.clusters["far"].kind == "prefill"


def test_without_a_log_it_says_what_to_give() -> None:
    result = run()
    assert result.exit_code == 2
    assert "--journal" in result.output


def test_a_log_that_was_cut_off_is_read_up_to_there(tmp_path: Path, true_journal: bytes) -> None:
    whole = read_recording(write(tmp_path / "a", true_journal))
    cut = read_recording(write(tmp_path / "b", true_journal[:-7]))
    assert len(cut.rows) == len(whole.rows)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b'{"version":1', "no whole line"),
        (b"hello\n", "not a header"),
        (b"\x00\xff\n", "not a header"),
    ],
)
def test_a_file_that_is_no_journal_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = write(tmp_path / "bad.jsonl", content)
    with pytest.raises(ConfigError, match=message):
        read_recording(path)


def test_a_damaged_line_is_named(tmp_path: Path, true_journal: bytes) -> None:
    lines = true_journal.split(b"\n")
    lines[9] = b'{"type":"place","now_s":"soon"}'
    path = write(tmp_path / "bad.jsonl", b"\n".join(lines))
    with pytest.raises(ConfigError, match=r"bad\.jsonl: journal line 10: .*gateway\.journal"):
        read_recording(path)


def test_a_damaged_decision_log_names_its_line(tmp_path: Path, true_journal: bytes) -> None:
    rows = read_recording(write(tmp_path / "j", true_journal)).rows
    lines = decision_log(rows).split(b"\n")
    lines[4] = b'{"request_id": 5}'
    path = write(tmp_path / "bad.jsonl", b"\n".join(lines))
    with pytest.raises(ConfigError, match=r"bad\.jsonl: line 5: .*gateway\.decision_log"):
        read_decisions(path)


def test_logs_are_not_mistaken_for_each_other(tmp_path: Path, true_journal: bytes) -> None:
    path = write(tmp_path / "j", true_journal)
    log = write(tmp_path / "d", decision_log(read_recording(path).rows))
    with pytest.raises(ConfigError, match=r"gateway\.journal"):
        read_recording(log)
    with pytest.raises(ConfigError, match=r"gateway\.decision_log"):
        read_decisions(path)


def test_too_few_requests_teach_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "j", journal(requests=3))
    with pytest.raises(ConfigError, match="at least 4 are needed"):
        read_recording(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    result = run("--journal", str(tmp_path / "nowhere.jsonl"))
    assert result.exit_code == 2
    assert "nowhere.jsonl" in result.output
