"""What the shared options mean."""

from __future__ import annotations

import pytest
from run_results import make_fleet

from prfaas.errors import ConfigError
from simulations.commands.options import at_rate, with_links
from simulations.commands.policy_spec import fleet_policy, parse_policies, parse_policy
from simulations.workload.load import load_trace


def test_a_policy_is_a_name_with_parameters_read_as_yaml() -> None:
    spec = parse_policy("threshold:tokens=8000,share=0.5,fast=true,mode=hard")
    assert (spec.name, spec.label) == ("threshold", "threshold:tokens=8000,share=0.5,fast=true,mode=hard")
    assert spec.parameters == {"tokens": 8000, "share": 0.5, "fast": True, "mode": "hard"}


def test_a_class_is_named_with_its_module_with_or_without_parameters() -> None:
    assert parse_policy("my.module:Class").name == "my.module:Class"
    spec = parse_policy("my.module:Class:weight=2")
    assert (spec.name, spec.parameters) == ("my.module:Class", {"weight": 2})


def test_policies_are_parted_at_commas_that_do_not_begin_a_parameter() -> None:
    specs = parse_policies("a,b:x=1,y=2,c.d:E,f.g:H:z=3")
    assert [(spec.name, spec.parameters) for spec in specs] == [
        ("a", {}),
        ("b", {"x": 1, "y": 2}),
        ("c.d:E", {}),
        ("f.g:H", {"z": 3}),
    ]


@pytest.mark.parametrize("text", ["", "a,,b", "a:x=", "a:x=1,x=2", ":x=1"])
def test_a_malformed_policy_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="policy"):
        parse_policies(text)


def test_a_policy_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        parse_policies("a,b,a")
    assert len(parse_policies("a:x=1,a:x=2")) == 2


def test_the_fleet_names_the_default_policy() -> None:
    assert fleet_policy(make_fleet()).name == "cost_model"


def test_a_rate_is_reached_by_scaling_arrivals() -> None:
    trace = load_trace("generate:lognormal?requests=500&rate=2", seed=1)
    assert at_rate(trace, None, 6.0).rate_per_s == pytest.approx(6.0)
    assert at_rate(trace, 3.0, None).rate_per_s == pytest.approx(3 * trace.rate_per_s)
    assert at_rate(trace, None, None) is trace


@pytest.mark.parametrize(("scale", "rate"), [(2.0, 3.0), (0.0, None), (None, -1.0), (float("nan"), None)])
def test_a_rate_that_makes_no_sense_is_refused(scale: float | None, rate: float | None) -> None:
    trace = load_trace("generate:lognormal?requests=10", seed=1)
    with pytest.raises(ConfigError, match="--rate"):
        at_rate(trace, scale, rate)


def test_a_link_is_overridden_by_name_or_all_at_once() -> None:
    for text in ("wan=5Gbit", "5Gbit"):
        fleet = with_links(make_fleet(), (text,))
        assert fleet.links["wan"].capacity * 8 == 5e9
        assert fleet.links["wan"].rtt == make_fleet().links["wan"].rtt


@pytest.mark.parametrize("text", ["5", "lan=5Gbit", "0Gbit", "fast"])
def test_a_link_that_is_no_rate_or_not_there_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--link"):
        with_links(make_fleet(), (text,))
