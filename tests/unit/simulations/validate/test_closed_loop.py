"""The closed form against a plain loop that steps every token of every client."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from simulations.fleet import HardwareSpec
from simulations.hardware.table_times import TableStepTimes
from simulations.hardware.tables import CostTable
from simulations.validate.closed_loop import CHUNK_TOKENS, Bare, Overheads, bare, predict
from simulations.validate.points import Point

APART, IN_STEP = Overheads(in_step=0.0), Overheads(in_step=1.0)


@cache
def times() -> TableStepTimes:
    new, prefix = np.array([64.0, 1024, 8192, 32768]), np.array([0.0, 8192])
    batch, context = np.array([1.0, 16, 256]), np.array([512.0, 65536])
    n, c = np.meshgrid(new, prefix, indexing="ij")
    b, x = np.meshgrid(batch, context, indexing="ij")
    table = CostTable(
        "t", new, prefix, 0.008 + 4e-5 * n + 1e-9 * n * c, batch, context, 0.01 + 5e-5 * b + 2e-8 * b * x
    )
    return TableStepTimes(table, HardwareSpec(chunk_tokens=CHUNK_TOKENS, kv_tokens=10**9))


def case(
    clients: int, inputs: int, answers: int, *, split: tuple[int, int] | None = None, kv_tokens: int = 2**40
) -> Bare:
    point = Point(
        model="m", system="s", backend="b", precision="p", mode="disagg" if split else "agg",
        input_tokens=inputs, output_tokens=answers, clients=clients, prefill_table="", decode_table="",
        prefill_workers=split[0] if split else 1, decode_workers=split[1] if split else 1,
        decode_attention_dp=1, ttft_s=1.0, tpot_s=1.0,
    )  # fmt: skip
    return bare(point, times(), times(), kv_tokens)


@dataclass
class Client:
    sent_s: float
    left_prompt: int
    first_s: float = -1.0
    made: int = 0


def stepped(loop: Bare, starts_s: list[float], first_round: int, rounds: int) -> tuple[float, float]:
    """(mean TTFT, mean TPOT) of one worker over the requests of rounds `first_round` … `rounds` - 1.

    In the last round clients do not send again.

    Each step carries all decodes and one chunk of the prompts that wait, first come first served.
    """
    point, engine, now_s = loop.point, loop.decode, 0.0
    waiting = [Client(start_s, point.input_tokens) for start_s in sorted(starts_s)]
    running: list[Client] = []
    ttft: list[float] = []
    tpot: list[float] = []
    ended = 0
    while ended < rounds * point.clients:
        budget, done, joined = CHUNK_TOKENS, 0, []
        for client in [client for client in waiting if client.sent_s <= now_s]:
            part = min(budget - done, client.left_prompt)
            client.left_prompt -= part
            done += part
            if client.left_prompt == 0:
                joined.append(client)
            if done == budget:
                break
        if not done and not running:
            now_s = min(client.sent_s for client in waiting)
            continue
        now_s += engine.chunk_s(done, 0) if done else 0.0
        if running:
            context = sum(point.input_tokens + client.made for client in running)
            line = engine.decode_line(len(running), context)
            now_s += line.base_s + line.slope_s * context - (engine.shared_base_s() if done else 0.0)
        for client in list(running):
            client.made += 1
            if client.made == point.output_tokens:
                running.remove(client)
                ended += 1
                if ended > first_round * point.clients:
                    ttft.append(client.first_s - client.sent_s)
                    tpot.append((now_s - client.first_s) / (point.output_tokens - 1))
                if ended <= (rounds - 1) * point.clients:
                    waiting.append(Client(now_s, point.input_tokens))
        for client in joined:
            waiting.remove(client)
            client.first_s, client.made = now_s, 1
            running.append(client)
    return float(np.mean(ttft)), float(np.mean(tpot))


CASES = [(1, 4096, 50), (8, 1024, 200), (16, 8192, 150), (32, 2048, 100)]


@pytest.mark.parametrize(("clients", "inputs", "answers"), CASES)
def test_clients_that_begin_at_once_meet_a_wave(clients: int, inputs: int, answers: int) -> None:
    loop = case(clients, inputs, answers)
    ttft_s, tpot_s = stepped(loop, [0.0] * clients, 0, 1)
    found = predict(loop, IN_STEP)
    assert found[0] == pytest.approx(ttft_s, rel=0.1)
    assert found[1] == pytest.approx(tpot_s, rel=0.12)


@pytest.mark.parametrize(("clients", "inputs", "answers"), CASES)
def test_clients_that_begin_at_random_are_apart(clients: int, inputs: int, answers: int) -> None:
    loop = case(clients, inputs, answers)
    found = predict(loop, APART)
    cycle_s = found[0] + answers * found[1]
    rng = np.random.default_rng(clients)
    for starts_s in (rng.random((4, clients)) * cycle_s).tolist():
        ttft_s, tpot_s = stepped(loop, starts_s, 1, 4)
        # Equal answers keep their distance, and clients that once shared a chunk stay together: the form,
        # which has them meet at random, is loose for the first token and sharp for the rest.
        assert 0.95 * loop.prefill_s <= ttft_s <= 1.6 * found[0]
        assert found[1] == pytest.approx(tpot_s, rel=0.12)
        assert cycle_s == pytest.approx(ttft_s + answers * tpot_s, rel=0.1)


def test_a_client_alone_is_served_by_a_worker_alone() -> None:
    loop = case(1, 4096, 1000)
    ttft_s, tpot_s = predict(loop, APART)
    line = times().decode_line(1, 4596.0)
    assert tpot_s == pytest.approx(line.base_s + line.slope_s * 4596.0)
    assert ttft_s == pytest.approx(times().prefill_s(4096, 0) + tpot_s / 2, rel=0.01)


def test_overheads_act_as_in_a_fleets_hardware() -> None:
    loop = case(1, 20_000, 1000)  # three chunks
    _, tpot_s = predict(loop, APART)
    more = predict(loop, Overheads(2.0, 3.0, 0.004, 0.5))
    assert more[1] == pytest.approx(3 * tpot_s + 0.004)
    plain = times().prefill_s(20_000, 0)
    assert more[0] == pytest.approx(0.5 + 2 * plain + 3 * 0.004 + more[1] / 2, rel=0.02)


def test_clients_beyond_the_pool_wait_a_cycle_each() -> None:
    full = case(8, 1000, 100)
    short = case(16, 1000, 100, kv_tokens=8 * 1050)
    ttft_s, tpot_s = predict(full, APART)
    assert short.slots == 8
    waiting_s = predict(short, APART)[0] - ttft_s
    assert waiting_s == pytest.approx(ttft_s + 100 * tpot_s, rel=0.15)
    assert predict(short, APART)[1] == pytest.approx(tpot_s)


def test_prefill_workers_of_their_own_leave_decodes_alone() -> None:
    loop = case(8, 8192, 500, split=(2, 1))
    ttft_s, tpot_s = predict(loop, APART)
    context = 8 * (8192 + 250)
    line = times().decode_line(8, context)
    assert tpot_s <= line.base_s + line.slope_s * context
    assert ttft_s < predict(case(8, 8192, 500), APART)[0] * 1.2
    # One prefill worker that never idles: whoever does not decode waits there.
    crowded = predict(case(64, 8192, 10, split=(1, 1)), APART)
    assert crowded[0] + 10 * crowded[1] == pytest.approx(64 * times().prefill_s(8192, 0), rel=0.02)
