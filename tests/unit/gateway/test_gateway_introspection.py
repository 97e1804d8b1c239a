"""What the gateway tells of itself: models, tokens, decisions, metrics, journal; and calibration at start."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from gateway_fleet import Fleet, MakeFleet, chat
from prometheus_client.parser import text_string_to_metric_families
from scripted_worker import answer, fail, hang

from prfaas.kv.hashing import block_hashes
from prfaas.protocol.messages import KVStored
from router.core.journal import replay
from router.decision_log import DecisionRecord
from router.metrics import TERMS

CHAT = "/v1/chat/completions"


async def test_models_lists_the_one_model(fleet: Fleet) -> None:
    listed = await (await fleet.client.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["tiny"]
    assert listed["data"][0]["max_model_len"] == 256
    assert (await (await fleet.client.get("/v1/models/tiny")).json())["id"] == "tiny"
    assert (await fleet.client.get("/v1/models/other")).status == 404


@pytest.mark.parametrize("repeated", [1, 500], ids=["short", "long"])
async def test_tokenize_and_detokenize_are_inverse(fleet: Fleet, repeated: int) -> None:
    prompt = "Grüße 👋 there" * repeated
    tokens = await (await fleet.client.post("/tokenize", json={"prompt": prompt})).json()
    text = await (await fleet.client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
    assert text == {"prompt": prompt}
    assert tokens["count"] == len(tokens["tokens"])


async def test_tokenize_renders_messages_as_a_chat_request_would(fleet: Fleet) -> None:
    messages = chat("Hello there")["messages"]
    tokens = (await (await fleet.client.post("/tokenize", json={"messages": messages})).json())["tokens"]
    await fleet.client.post(CHAT, json=chat("Hello there"))
    assert fleet.decode.requests[0].token_ids == tokens


async def test_decisions_show_candidates_terms_and_what_happened(fleet: Fleet) -> None:
    fleet.decode.script = answer([([72], "Hello"), ([73], " you")])
    response = await fleet.client.post(CHAT, json=chat(stream=True))
    await response.read()
    record = (await (await fleet.client.get("/debug/decisions?limit=1")).json())["decisions"][0]

    assert record["request_id"].startswith(response.headers["x-request-id"])
    assert record["outcome"] == "ok"
    assert record["first_text"] == "Hello you"
    assert record["completion_tokens"] == 2
    assert record["decision"]["least_cost"] is True
    assert record["decision"]["chosen"]["ttft_s"] == record["predicted_ttft_s"]
    assert {(row["decode"], row["site"]) for row in record["decision"]["candidates"]} == {
        ("decode-0", "decode-0"), ("decode-0", "pool-0"), ("decode-0", "remote-0"),
    }  # fmt: skip
    assert 0 < record["ttft_s"] <= record["total_s"]
    assert {"start_s", "prefill_s", "ready_s", "step_s", "overhead_s", "ttft_s"} <= set(record["actual"])
    assert record["report"]["site"] == record["site"]


async def test_a_remote_placement_records_its_link_and_hidden_fraction(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(policy={"name": "always_remote"})
    await fleet.client.post(CHAT, json=chat())
    record = fleet.gateway.recorder.log.latest(1)[0]
    assert (record.kind, record.link, record.site) == ("remote", "wan", "remote-0")
    # 1 MB at 25 MB/s takes 40 ms; the report says that 1 ms of it was not hidden.
    assert record.hidden_fraction == pytest.approx(1 - 0.001 / 0.04)
    assert fleet.decode.requests[0].prefill is not None
    assert fleet.decode.requests[0].prefill.url == f"http://127.0.0.1:{fleet.workers['remote-0'].port}"


@pytest.mark.parametrize("limit", ["-1", "many", "1e3", "٣", "99999999999"])
async def test_a_wrong_limit_is_400(fleet: Fleet, limit: str) -> None:
    response = await fleet.client.get("/debug/decisions", params={"limit": limit})
    assert response.status == 400
    assert (await response.json())["error"]["param"] == "limit"


async def test_place_previews_without_booking_or_running(fleet: Fleet) -> None:
    previewed = await (await fleet.client.post("/debug/place", json=chat())).json()
    assert previewed["chosen"]["decode"] == "decode-0"
    assert len(previewed["candidates"]) == 3
    assert fleet.gateway.brain.scheduler.bookings == 0
    assert fleet.decode.requests == []
    ran = await fleet.client.post(CHAT, json=chat())
    assert ran.headers["x-prfaas-placement"] == previewed["chosen"]["kind"]


async def test_kv_events_make_a_cached_prompt_a_reuse(fleet: Fleet) -> None:
    ids = [7] * 130
    hashes = block_hashes(ids, 16)
    fleet.decode.publish(KVStored(generation="decode-0-1", sequence=1, block_hashes=hashes))
    body = {"model": "tiny", "prompt": ids, "max_tokens": 3}
    await asyncio.sleep(0.1)
    response = await fleet.client.post("/v1/completions", json=body)
    assert response.headers["x-prfaas-placement"] == "reuse"


async def test_a_gap_in_kv_events_is_counted_and_answered_by_a_new_snapshot(fleet: Fleet) -> None:
    fleet.decode.publish(KVStored(generation="decode-0-1", sequence=5, block_hashes=[1]))
    await fleet.until(lambda: fleet.decode.paths.count("/v1/events") == 2, "it subscribes again")
    await asyncio.sleep(0.1)
    samples = samples_of(fleet)
    assert samples["prfaas_index_gap_total", "decode-0"] == 1
    assert samples["prfaas_index_replay_total",] == len(fleet.workers) + 1
    assert (await fleet.client.post(CHAT, json=chat())).status == 200


def samples_of(fleet: Fleet) -> dict[tuple[str, ...], float]:
    """(sample's name, its labels' values in order) → value, of everything that the gateway exposes."""
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(fleet.gateway.metrics.render().decode())
        for sample in family.samples
    }


async def test_metrics_are_readable_and_compare_predicted_with_actual(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(policy={"name": "always_remote"})
    await fleet.client.post(CHAT, json=chat())
    await fleet.client.post(CHAT, json={})
    fleet.decode.script = fail("bad_request", "decode-0")
    await fleet.client.post(CHAT, json=chat())
    assert (await fleet.client.get("/metrics")).status == 200
    samples = samples_of(fleet)
    assert samples["prfaas_requests_total", "200", "chat"] == 1
    assert samples["prfaas_requests_total", "400", "chat"] == 2
    for term in TERMS:
        for family in ("predicted_term_seconds", "actual_term_seconds"):
            assert samples[f"prfaas_{family}_count", term] == 1, (family, term)
    for term in ("start", "prefill", "ready", "step", "ttft"):
        assert samples["prfaas_prediction_error_ratio_count", term] == 1, term
    assert samples["prfaas_queue_wait_seconds_count",] == 1
    assert samples["prfaas_worker_health", "decode", "decode-0"] == 1
    assert samples["prfaas_link_bandwidth_estimate_bytes_per_second", "far->pd"] == 25e6
    assert samples["prfaas_kv_transfer_failures_total", "bad_request"] == 1
    assert samples["prfaas_bookings",] == 0


async def test_terms_are_measured_as_the_cost_model_defines_them(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(policy={"name": "always_remote"})
    await fleet.client.post(CHAT, json=chat())
    record = fleet.gateway.recorder.log.latest(1)[0]
    assert set(record.actual) == {f"{term}_s" for term in TERMS}
    # The worker reports 1 ms from grant to first chunk; the grant itself travels half of 10 ms.
    assert record.actual["start_s"] == pytest.approx(0.006)
    assert record.actual["prefill_s"] == pytest.approx(0.01)


@pytest.mark.parametrize(("after", "phase"), [(0, "prefill"), (1, "decode")])
async def test_a_client_that_goes_away_is_counted_by_phase_and_no_gauge_stays_up(
    fleet: Fleet, after: int, phase: str
) -> None:
    fleet.decode.script = hang(after)
    pending = asyncio.create_task(fleet.client.post(CHAT, json=chat()))
    await fleet.until(lambda: samples_of(fleet)["prfaas_stage_requests", phase, "worker"] == 1, "it runs")
    pending.cancel()
    await asyncio.gather(pending, return_exceptions=True)
    await fleet.until(lambda: samples_of(fleet)["prfaas_cancellation_total", phase] == 1, "it is counted")
    left = {name: value for name, value in samples_of(fleet).items() if name[0] == "prfaas_stage_requests"}
    assert set(left.values()) == {0}


async def test_a_body_that_is_too_large_is_counted_as_413(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(gateway={"max_body": 1000})
    await fleet.client.post(CHAT, json=chat("x" * 5000))
    assert samples_of(fleet)["prfaas_requests_total", "413", "chat"] == 1


async def test_metrics_count_a_replaced_attempt_by_its_reason(fleet: Fleet) -> None:
    scripts = [fail("peer_lost", "remote-0"), answer([([72], "fine")])]
    fleet.decode.script = lambda request: scripts.pop(0)(request)
    await fleet.client.post(CHAT, json=chat())
    assert b'prfaas_migration_total{reason="peer_lost"} 1.0' in fleet.gateway.metrics.render()
    outcomes = [record.outcome for record in fleet.gateway.recorder.log.latest(2)]
    assert outcomes == ["ok", "peer_lost"]


async def test_the_decision_log_file_has_one_line_per_attempt(make_fleet: MakeFleet, tmp_path: Path) -> None:
    path = tmp_path / "logs" / "decisions.jsonl"
    fleet = await make_fleet(gateway={"decision_log": str(path)})
    scripts = [fail("peer_lost", "remote-0"), answer([([72], "fine")])]
    fleet.decode.script = lambda request: scripts.pop(0)(request)
    await fleet.client.post(CHAT, json=chat())
    records = [msgspec.json.decode(line, type=DecisionRecord) for line in path.read_bytes().splitlines()]
    assert [(record.attempt, record.outcome) for record in records] == [(1, "peer_lost"), (2, "ok")]


async def test_replaying_the_journal_gives_the_same_decisions(make_fleet: MakeFleet, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    fleet = await make_fleet(gateway={"journal": str(path)})
    for number in range(3):
        await fleet.client.post(CHAT, json=chat(f"question {number}"))
    live = [record.decision for record in reversed(fleet.gateway.recorder.log.latest(3))]
    await fleet.client.close()
    replayed = [decision.as_record() for decision in replay(path.read_bytes().splitlines())]  # type: ignore[union-attr]
    assert replayed == live


async def test_calibration_times_all_workers_warms_all_pairs_and_runs_marked_requests(
    make_fleet: MakeFleet,
) -> None:
    fleet = await make_fleet(ready=False, gateway={"calibrate": True})
    early = await fleet.client.post(CHAT, json=chat())
    assert early.status == 503
    assert "Retry-After" in early.headers
    await fleet.until(lambda: fleet.gateway.admission.started, "calibration ends")

    assert all(worker.paths.count("/v1/calibrate") == 1 for worker in fleet.workers.values())
    assert fleet.decode.paths.count("/v1/warm") == 2
    records = fleet.gateway.recorder.log.latest(100)
    assert {(record.decode, record.site) for record in records} == {
        ("decode-0", "decode-0"), ("decode-0", "pool-0"), ("decode-0", "remote-0"),
    }  # fmt: skip
    assert all(record.calibration and record.outcome == "ok" for record in records)
    assert len({request.cache_salt for request in fleet.decode.requests}) == len(records)
    assert all(view.measured for view in fleet.gateway.brain.scheduler.workers())


async def test_a_restarted_worker_keeps_its_profile_and_is_warmed_again(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(gateway={"calibrate": True})
    remote = fleet.workers["remote-0"]
    port, warmed = remote.port, fleet.decode.paths.count("/v1/warm")
    await remote.stop()
    await fleet.until(lambda: "remote-0" not in fleet.gateway.workers.ready(), "the worker is lost")
    remote.incarnation = "remote-0-2"
    await remote.start(port)
    await fleet.until(lambda: fleet.decode.paths.count("/v1/warm") == warmed + 1, "the pair is warmed")
    assert remote.paths.count("/v1/calibrate") == 1
    assert all(view.measured for view in fleet.gateway.brain.scheduler.workers())
