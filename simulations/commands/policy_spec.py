"""Policies as commands name them: `threshold`, `threshold:tokens=8000`, `my.module:Class:weight=2`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import yaml

from policies.types import Policy
from prfaas.errors import ConfigError
from router.core.policy_loader import load_policy
from simulations.fleet import Fleet
from simulations.result import RunResult


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy by name with its parameters; `label` is how tables call it."""

    label: str
    name: str
    parameters: dict[str, Any]

    def make(self) -> Policy:
        """A fresh instance.

        Raises:
            ConfigError: there is no such policy, or it refuses the parameters.
        """
        return load_policy(self.name, self.parameters)

    def labelled(self, run: RunResult) -> RunResult:
        """`run` under the name by which its policy was asked for."""
        return replace(run, policy=self.label)


def parse_policy(text: str) -> PolicySpec:
    """`NAME[:param=value[,param=value…]]`, where NAME is an entry point or `module:Class`.

    Raises:
        ConfigError: it is not of that form.
    """
    name, colon, tail = text.rpartition(":")
    if not colon or "=" not in tail:
        name, tail = text, ""
    if not name.strip():
        raise ConfigError(f"policy `{text}`: write NAME or NAME:parameter=value,…")
    parameters: dict[str, Any] = {}
    for part in tail.split(",") if tail else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key or not value or key in parameters:
            raise ConfigError(f"policy `{text}`: `{part}` should be parameter=value, each given once")
        parameters[key] = _value(value)
    return PolicySpec(text.strip(), name.strip(), parameters)


def parse_policies(text: str) -> list[PolicySpec]:
    """Several policies, joined by commas; what follows a policy's parameter with `=` is a parameter too.

    Raises:
        ConfigError: a policy is malformed or named twice.
    """
    pieces: list[str] = []
    for piece in text.split(","):
        if "=" in piece and ":" not in piece.partition("=")[0] and pieces:
            pieces[-1] += f",{piece}"
        else:
            pieces.append(piece)
    specs = [parse_policy(piece) for piece in pieces]
    twice = {spec.label for spec in specs if sum(other.label == spec.label for other in specs) > 1}
    if twice:
        raise ConfigError(f"--policies names `{min(twice)}` twice")
    return specs


def fleet_policy(fleet: Fleet) -> PolicySpec:
    """The policy that the fleet's file names."""
    parameters = dict(fleet.policy.parameters)
    tail = ",".join(f"{key}={value}" for key, value in parameters.items())
    return PolicySpec(
        f"{fleet.policy.name}:{tail}" if tail else fleet.policy.name, fleet.policy.name, parameters
    )


def _value(text: str) -> Any:
    """A number, truth value or text, as YAML reads it."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, (int, float, bool, str)) else text
