"""Open a trace by file and format, or generate one: what `--trace` takes.

FILE                          format by content
FILE?option=value&…           with options of its importer (docs/simulation-formats.md)
generate:FAMILY?option=value  made up, seeded
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from prfaas.config import Section
from prfaas.config_load import convert, parse_text, suggest
from prfaas.errors import ConfigError
from simulations.workload.detect import FORMATS, detect_format
from simulations.workload.trace import Trace

GENERATE = "generate:"


def load_trace(spec: str | os.PathLike[str], format: str | None = None, *, seed: int | None = None) -> Trace:
    """The trace that `spec` names, whole and checked.

    Args:
        format: a name of `FORMATS`; None = by content.
        seed: of what an importer or a generator draws, where `spec` itself names none.

    Raises:
        ConfigError: what is wrong, with file, line and field.
    """
    text = os.fspath(spec)
    if text.startswith(GENERATE):
        if format is not None:
            raise ConfigError(f"--format {format} is of files; leave it out with `{GENERATE}…`")
        from simulations.workload.generate import FAMILIES, generate

        family, options = split_options(text.removeprefix(GENERATE))
        if family not in FAMILIES:
            raise ConfigError(f"there is no generator `{family}`{suggest(family, FAMILIES)}")
        parsed = parse_options(FAMILIES[family], options, seed, f"{GENERATE}{family}")
        return generate(parsed, name=family)
    name, options = (text, {}) if Path(text).exists() else split_options(text)
    path = Path(name)
    if not path.exists():
        raise ConfigError(f"there is no trace {name}; `{GENERATE}…` makes one up ({_families()})")
    if format is not None and format not in FORMATS:
        raise ConfigError(f"there is no trace format `{format}`{suggest(format, FORMATS)}")
    module = import_module(FORMATS[format or detect_format(path)])
    return _read(module, path, options, seed)


def _read(module: Any, path: Path, options: dict[str, str], seed: int | None) -> Trace:
    trace = module.read(path, parse_options(module.Options, options, seed, str(path)))
    assert isinstance(trace, Trace)
    return trace


def _families() -> str:
    from simulations.workload.generate import FAMILIES

    return ", ".join(FAMILIES)


def split_options(text: str) -> tuple[str, dict[str, str]]:
    """`name?a=1&b=2` → (`name`, {a: 1, b: 2}), values still text.

    Raises:
        ConfigError: an option without `=`, or given twice.
    """
    name, _, query = text.partition("?")
    options: dict[str, str] = {}
    for part in query.split("&") if query else ():
        key, equals, value = part.partition("=")
        if not equals or key in options:
            raise ConfigError(f"`{text}`: `{part}` should be option=value, each given once")
        options[key] = value
    return name, options


def parse_options(kind: type[Section], options: dict[str, str], seed: int | None, source: str) -> Any:
    """`options` as a `kind`, strictly; `seed` where they name none and `kind` has one.

    Raises:
        ConfigError: an unknown option or a value of a wrong type; names `source`.
    """
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    tree: dict[str, Any] = {
        key: parse_text(fields.get(key, str), value, f"`{source}`: option `{key}`")
        for key, value in options.items()
    }
    if seed is not None and "seed" in fields:
        tree.setdefault("seed", seed)
    try:
        return convert(kind, tree)
    except ConfigError as error:
        raise ConfigError(f"`{source}`: {error}") from error
