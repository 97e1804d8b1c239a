"""An engine told to use a share of its cores rests in proportion to its work."""

from __future__ import annotations

import pytest

from prfaas.engine.duty_cycle import DutyCycle


class Machine:
    """CPU time that tests set, and the rests taken."""

    def __init__(self) -> None:
        self.cpu_s = 5.0
        self.rests_s: list[float] = []

    def duty_cycle(self, share: float, threads: int = 1) -> DutyCycle:
        return DutyCycle(share, threads, cpu_time=lambda: self.cpu_s, sleep=self.rests_s.append)


@pytest.mark.parametrize(("share", "rest_s"), [(0.5, 2.0), (0.4, 3.0), (0.8, 0.5)])
def test_work_and_rest_add_up_to_the_share(share: float, rest_s: float) -> None:
    machine = Machine()
    duty_cycle = machine.duty_cycle(share)
    machine.cpu_s += 2.0
    duty_cycle.rest()
    assert machine.rests_s == [pytest.approx(rest_s)]


def test_work_is_accounted_once() -> None:
    machine = Machine()
    duty_cycle = machine.duty_cycle(0.5)
    machine.cpu_s += 1.0
    duty_cycle.rest()
    duty_cycle.rest()
    assert machine.rests_s == [pytest.approx(1.0), 0.0]


def test_cpu_time_of_several_threads_counts_once_per_thread() -> None:
    machine = Machine()
    duty_cycle = machine.duty_cycle(0.5, threads=4)
    machine.cpu_s += 4.0
    duty_cycle.rest()
    assert machine.rests_s == [pytest.approx(1.0)]


def test_a_full_share_never_rests() -> None:
    machine = Machine()
    duty_cycle = machine.duty_cycle(1.0)
    machine.cpu_s += 1.0
    duty_cycle.rest()
    assert machine.rests_s == []
