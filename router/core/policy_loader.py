"""Find a policy by name: an entry point of group `prfaas.policies`, or `module:Class`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, cast, get_type_hints

import msgspec

from policies.types import Policy
from prfaas.errors import ConfigError

GROUP = "prfaas.policies"


def load_policy(name: str, parameters: Mapping[str, Any] | None = None) -> Policy:
    """An instance of the policy called `name`, made with `parameters` as keyword arguments.

    Raises:
        ConfigError: there is no such policy, it cannot be imported, it refuses the parameters, or it has
            no `choose`; the message says which and what would be valid.
    """
    factory = _find(name)
    _check_types(name, factory, parameters or {})
    try:
        policy = factory(**dict(parameters or {}))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"policy.parameters: policy `{name}` refuses them: {error}") from error
    for method in ("choose", "observe", "control"):
        if not callable(getattr(policy, method, None)):
            raise ConfigError(
                f"policy.name: `{name}` has no method `{method}`; derive it from policies.base.BasePolicy "
                "(docs/policies.md shows how)"
            )
    return cast(Policy, policy)


def _check_types(name: str, factory: Any, parameters: Mapping[str, Any]) -> None:
    """Values must have the types that the constructor names; where it names none, anything goes."""
    try:
        hints = get_type_hints(factory.__init__)
    except (NameError, TypeError, AttributeError):
        return
    for key, value in parameters.items():
        if key in hints:
            try:
                msgspec.convert(value, hints[key])
            except msgspec.ValidationError as error:
                problem = f"{error}"[:1].lower() + f"{error}"[1:]
                raise ConfigError(f"policy.parameters.{key}: policy `{name}`: {problem}") from error
            except TypeError:
                continue


def _find(name: str) -> Any:
    if ":" in name:
        return _import(name)
    known = {point.name: point for point in entry_points(group=GROUP)}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean `{near[0]}`? " if near else ""
        raise ConfigError(
            f"policy.name: no policy is called `{name}`; {hint}Known: {', '.join(sorted(known)) or 'none'}; "
            "or write `module:Class`"
        )
    return _import(known[name].value)


def _import(path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"policy.name: cannot import `{module_name}` of `{path}`: {error}") from error
    if not hasattr(module, attribute):
        raise ConfigError(f"policy.name: module `{module_name}` has no `{attribute}`")
    return getattr(module, attribute)
