"""`prfaas simulate …`: one module per command, imported when it is called."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import click

from prfaas.errors import ConfigError

COMMANDS = {
    "paper": "reproduce the PrfaaS case study",
    "replay": "replay one trace on one fleet under one policy",
    "compare": "the same trace under several policies",
    "capacity": "highest rate that meets the service levels; cheapest fleet",
    "calibrate": "turn a live decision log into a profile",
    "validate": "predict measured GPU points",
}
"""`simulations.commands.<name>` holds the click command called `command`."""

OWN = ("simulations", "router", "policies", "prfaas")
"""A missing module of these is a mistake of ours, any other a package that is not installed."""


class LazyGroup(click.Group):
    """Commands whose modules are imported when they are needed: `--help` stays fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        try:
            command = import_module(f"simulations.commands.{cmd_name}").command
        except ModuleNotFoundError as error:
            if error.name and error.name.split(".")[0] in OWN:
                raise
            raise ConfigError(
                f"`prfaas simulate` needs the package {error.name}: pip install 'prfaas[simulate]'"
            ) from error
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # commands that know something by then show it and end on their own
            from simulations.console import INTERRUPTED, note

            note("prfaas: interrupted before anything was known")
            sys.exit(INTERRUPTED)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup)
def simulate() -> None:
    """Replay traces on a described fleet: the live scheduler and policies on a virtual clock."""
