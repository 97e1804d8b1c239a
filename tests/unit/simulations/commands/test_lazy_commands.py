"""`prfaas simulate` itself: its list of commands, and what it says where packages are missing."""

from __future__ import annotations

import sys

import pytest
from click.testing import CliRunner

from launcher.cli import main
from simulations.cli import COMMANDS


def test_help_names_every_command_without_importing_any() -> None:
    before = set(sys.modules)
    result = CliRunner().invoke(main, ["simulate", "--help"])
    assert result.exit_code == 0
    assert all(name in result.output for name in COMMANDS)
    assert not [name for name in set(sys.modules) - before if name.startswith("simulations.commands.")]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help_text(name: str) -> None:
    result = CliRunner().invoke(main, ["simulate", name, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage:" in result.output


def test_a_package_that_is_not_installed_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("simulations.commands.paper")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "simulations.paper.event_driven", None)  # importing it now fails
    monkeypatch.setattr("simulations.cli.OWN", ())
    result = CliRunner().invoke(main, ["simulate", "paper", "--help"])
    assert result.exit_code == 2
    assert "prfaas[simulate]" in result.stderr
