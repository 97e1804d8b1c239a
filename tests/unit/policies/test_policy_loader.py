from __future__ import annotations

import sys
import types
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from policies.cost_model import CostModel
from policies.threshold import Threshold
from prfaas.errors import ConfigError
from router.core.policy_loader import load_policy

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["cost_model", "threshold", "always_local", "always_remote", "round_robin"])
def test_every_built_in_policy_loads_by_its_entry_point(name: str) -> None:
    assert name in {point.name for point in entry_points(group="prfaas.policies")}
    assert callable(load_policy(name).choose)


def test_parameters_reach_the_policy() -> None:
    assert isinstance(load_policy("threshold", {"tokens": 5}), Threshold)
    assert isinstance(load_policy("policies.cost_model:CostModel", {"externality_weight": 0.5}), CostModel)


def test_the_documented_example_loads_by_module_and_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    assert type(load_policy("examples.policy_example:LMetric")).__name__ == "LMetric"


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"policy\.name.*`cost_modle`; did you mean `cost_model`"):
        load_policy("cost_modle")


def test_wrong_parameters_are_named() -> None:
    with pytest.raises(ConfigError, match=r"policy\.parameters: policy `threshold`.*'token'"):
        load_policy("threshold", {"token": 3})
    with pytest.raises(ConfigError, match="tokens must be 0 or more"):
        load_policy("threshold", {"tokens": -3})


def test_missing_modules_and_classes_are_named() -> None:
    with pytest.raises(ConfigError, match="cannot import `no_such_module`"):
        load_policy("no_such_module:Thing")
    with pytest.raises(ConfigError, match=r"module `policies\.fixed` has no `Nothing`"):
        load_policy("policies.fixed:Nothing")


def test_a_class_that_is_no_policy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("not_a_policy")
    module.Thing = type("Thing", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "not_a_policy", module)
    with pytest.raises(ConfigError, match="has no method `choose`"):
        load_policy("not_a_policy:Thing")


def test_a_parameter_of_another_type_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"policy\.parameters\.tokens: policy `threshold`: expected `int`"):
        load_policy("threshold", {"tokens": "abc"})
    assert load_policy("cost_model", {"externality_weight": 0}) is not None
