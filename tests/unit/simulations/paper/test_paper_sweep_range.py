"""`--sweep`: what is understood, and one clear line for what is not."""

from __future__ import annotations

import pytest

from prfaas.errors import ConfigError
from simulations.paper.sweep_range import SweepRange, parse_sweep


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("link=1..100Gbps", SweepRange("link", 1.0, 100.0)),
        ("link=500Mbit..10Gbit", SweepRange("link", 0.5, 10.0)),
        ("link=1GB/s..2GB/s", SweepRange("link", 8.0, 16.0)),
        ("load=0.1..0.95", SweepRange("load", 0.1, 0.95)),
    ],
)
def test_ranges_are_understood(text: str, expected: SweepRange) -> None:
    found = parse_sweep(text)
    assert (found.kind, found.low, found.high) == (
        expected.kind,
        pytest.approx(expected.low),
        pytest.approx(expected.high),
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("link=0..", "two ends"),
        ("link=..5Gbps", "two ends"),
        ("link=5Gbps", "two ends"),
        ("link=0..10Gbps", "rise from above 0"),
        ("link=10..1Gbps", "rise from above 0"),
        ("link=1..100", "needs a unit|not a data rate"),
        ("link=-1..10Gbps", "not a quantity"),
        ("rtt=1..2", "unknown quantity `rtt`"),
        ("link", "unknown quantity|two ends"),
        ("load=a..b", "a number"),
        ("load=0.5..7", "at most 2"),
        ("load=nan..0.5", "rise from above 0"),
    ],
)
def test_nonsense_is_refused_in_one_line_with_an_example(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        parse_sweep(text)
    assert "\n" not in str(error.value)
    assert "write l" in str(error.value)


def test_links_are_spaced_by_ratio_and_loads_by_step() -> None:
    assert SweepRange("link", 1, 100).values(3) == pytest.approx([1, 10, 100])
    assert SweepRange("load", 0.1, 0.5).values(3) == pytest.approx([0.1, 0.3, 0.5])
