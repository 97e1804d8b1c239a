"""The `prfaas` command. Mistakes of the user end in one sentence and exit code 2, failures in code 1."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import click

from launcher.logs import LogFormat, configure_logging
from prfaas.config import Config
from prfaas.config_check import check_standalone
from prfaas.config_load import load
from prfaas.errors import ConfigError, PrfaasError
from prfaas.units import Rate, Seconds

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
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                raise
            self._end(f"cannot listen: {error.strerror}", code=1)

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
@config_option
@log_options
def up(config_path: Path, log_format: LogFormat, log_level: str) -> None:
    """Start every worker and the gateway on this machine and keep them running until Ctrl-C."""
    from launcher.up import run_up

    configure_logging(log_format, "warning" if log_level == "info" else log_level)
    flags = ("--log-format", log_format, "--log-level", log_level)
    sys.exit(run_up(_load_with_model(config_path), flags))


@main.command()
@config_option
@log_options
def router(config_path: Path, log_format: LogFormat, log_level: str) -> None:
    """Run the gateway alone."""
    config = _load_standalone(config_path)
    from router.main import run_gateway

    configure_logging(log_format, log_level)
    run_gateway(config)


@main.command()
@config_option
@flag("--name", "name", env="WORKER_NAME", required=True, help="Which worker of the configuration to run.")
@log_options
def worker(config_path: Path, name: str, log_format: LogFormat, log_level: str) -> None:
    """Run one worker alone."""
    config = _load_standalone(config_path)
    names = [known for cluster in config.clusters.values() for known in cluster.workers]
    if name not in names:
        raise ConfigError(f"--name {name} is no worker of {config_path} (known: {', '.join(names)})")
    from prfaas.worker.main import run_worker

    configure_logging(log_format, log_level)
    run_worker(config, name)


@main.command()
@flag(
    "--link",
    env="DEMO_LINK",
    type=Quantity(Rate),
    default="200Mbit",
    show_default=True,
    help="Emulated rate.",
)
@flag(
    "--rtt",
    env="DEMO_RTT",
    type=Quantity(Seconds),
    default="40ms",
    show_default=True,
    help="Emulated round trip.",
)
@flag(
    "--data",
    env="DEMO_DATA",
    type=click.Path(path_type=Path),
    help="Agent text (.tar.zst) instead of documents.",
)
@flag("--requests", env="DEMO_REQUESTS", type=click.IntRange(min=1), help="Most requests to send.")
@flag("--seed", env="DEMO_SEED", type=int, default=0, show_default=True, help="Of the workload.")
@flag(
    "--json",
    "json_path",
    env="DEMO_JSON",
    type=click.Path(path_type=Path),
    help="Also write every request here.",
)
@flag(
    "--model-dir",
    env="DEMO_MODEL",
    type=click.Path(path_type=Path),
    help="HF folder instead of the small model.",
)
@flag("--state-dir", env="DEMO_STATE_DIR", type=click.Path(path_type=Path), default="runs", show_default=True)
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
    """Two clusters on this machine serve real text; shows every placement, ends with a summary."""
    from launcher.demo.run import DemoOptions, run_demo

    configure_logging("text", "warning")
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
@click.option(
    "-c", "--config", "config_path", envvar="PRFAAS_CONFIG", show_envvar=True, type=click.Path(path_type=Path)
)
@flag("--json", "as_json", env="DOCTOR_JSON", is_flag=True, help="Print one JSON object instead of a table.")
def doctor(config_path: Path | None, as_json: bool) -> None:
    """Check this machine (and a configuration) and say how to mend what fails."""
    from launcher.doctor import run_doctor

    sys.exit(run_doctor(config_path, as_json=as_json))


@main.command()
@flag("--cache-dir", env="CACHE", type=click.Path(path_type=Path), help="Where models are kept.")
def model(cache_dir: Path | None) -> None:
    """Fetch the small model once and convert it to a normal HF folder; prints where it is."""
    from launcher.model import ensure_model

    click.echo(ensure_model(cache_dir, lambda step: click.echo(step, err=True)))


def _load_standalone(path: Path) -> Config:
    config = _load_with_model(path)
    check_standalone(config)
    return config


def _load_with_model(path: Path) -> Config:
    config = load(path)
    if not (Path(config.model.path) / "config.json").is_file():
        raise ConfigError(
            f"`model.path` {config.model.path} holds no config.json; give an HF folder, "
            f"or fetch the small model with `prfaas model`"
        )
    return config
