"""Read the configuration: YAML file, environment twins, strict conversion, checks.

Every error is one sentence that names the field by its path and, for a misspelt name, the nearest valid
one. Sections are walked here and not left to msgspec because its paths do not say which cluster, worker or
link is meant; leaf values are msgspec's.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import yaml

from prfaas.config import ClusterConfig, Config, Section, WorkerConfig
from prfaas.config_check import check
from prfaas.errors import ConfigError
from prfaas.units import Bytes, Rate, Seconds

ENV_PREFIX = "PRFAAS_"
_QUANTITIES = (Seconds, Bytes, Rate)


def load(path: str | os.PathLike[str], environment: Mapping[str, str] | None = None) -> Config:
    """The checked configuration in the file at `path`, with environment twins applied over it.

    Args:
        environment: variables to look for `PRFAAS_…` twins in; None = this process's.

    Raises:
        ConfigError: unreadable, misspelt, of a wrong type, or contradictory.
    """
    return loads(read_text(path), environment, source=str(path))


def loads(text: str, environment: Mapping[str, str] | None = None, source: str = "configuration") -> Config:
    """Like `load`, from a string; `source` names it in errors."""
    tree = parse_mapping(text, source, "`model` and `clusters`")
    apply_environment(tree, os.environ if environment is None else environment)
    config: Config = convert(Config, tree)
    config = expand_counts(config)
    check(config)
    return config


def read_text(path: str | os.PathLike[str]) -> str:
    """Contents of a file of configuration.

    Raises:
        ConfigError: it cannot be read, or is no UTF-8 text.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read configuration {path}: {reason}") from error


def parse_mapping(text: str, source: str, top: str) -> dict[Any, Any]:
    """The YAML mapping in `text`, in which no key is given twice; `top` says what an error asks for.

    Raises:
        ConfigError: no valid YAML, or no mapping; names `source`, line and column.
    """
    try:
        tree = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {_yaml_problem(error)}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{source} must be a mapping with {top} at the top")
    return tree


def _yaml_problem(error: yaml.YAMLError) -> str:
    """`line 3, column 7: mapping values are not allowed here`."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


def dump(config: Section) -> str:
    """YAML text of a whole configuration, which `loads` turns into an equal one, or of any other section."""
    return yaml.safe_dump(msgspec.to_builtins(config, enc_hook=_plain), sort_keys=False)


# ---------------------------------------------------------------- strict conversion


def convert(kind: Any, value: Any, path: str = "") -> Any:
    """`value`, a raw YAML tree, as `kind`: a `Section`, a dictionary of them, or a leaf's type.

    Raises:
        ConfigError: misspelt, missing or of a wrong type; names the field by its path below `path`.
    """
    if isinstance(kind, type) and issubclass(kind, Section):
        return _build_section(kind, value, path)
    named = _named_sections(kind)
    if named is None:
        return _leaf(kind, value, path)
    _require_mapping(value, path)
    for name in value:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"`{path}`: `{name}` must be a name (text)")
    return {name: convert(named, item, f"{path}.{name}") for name, item in value.items()}


def _build_section(kind: type[Section], value: Any, path: str) -> Section:
    _require_mapping(value, path)
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for name in value:
        if name not in fields:
            raise ConfigError(f"unknown field `{_join(path, name)}`{suggest(str(name), fields)}")
    for name, field in fields.items():
        if field.required and name not in value:
            raise ConfigError(f"`{_join(path, name)}` is missing")
    return kind(**{name: convert(fields[name].type, item, _join(path, name)) for name, item in value.items()})


def _leaf(kind: Any, value: Any, path: str) -> Any:
    try:
        return msgspec.convert(value, kind, dec_hook=_quantity)
    except (msgspec.ValidationError, ValueError) as error:
        reason = str(error).replace(" - at `$", f" - at `{path}")
        is_said = path.startswith("auth.") or f"`{value}`" in reason  # tokens are secret
        shown = "" if is_said else f" ({value!r})"
        raise ConfigError(f"`{path}`: {reason}{shown}") from error


def _quantity(kind: type, value: Any) -> Any:
    if kind in _QUANTITIES:
        return kind.parse(value)
    raise NotImplementedError(kind)


def _plain(value: Any) -> Any:
    """A quantity as YAML text or number that parses back to exactly the same value."""
    if isinstance(value, Rate):
        return f"{Decimal(repr(float(value))):f}B/s"
    if isinstance(value, Bytes):
        return int(value)
    if isinstance(value, Seconds):
        return float(value)
    raise NotImplementedError(type(value))


def _named_sections(kind: Any) -> type[Section] | None:
    """The section type of `dict[str, Section]`; None for every other type."""
    if get_origin(kind) is dict:
        value_kind = get_args(kind)[1]
        if isinstance(value_kind, type) and issubclass(value_kind, Section):
            return value_kind
    return None


def _require_mapping(value: Any, path: str) -> None:
    if not isinstance(value, dict):
        raise ConfigError(f"`{path}` must be a mapping, got {value!r}")


def _join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def suggest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that refuses `name`: the nearest known name, else all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean `{near[0]}`?" if near else f" (known: {', '.join(names)})"


class _UniqueKeyLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice, where PyYAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, f"`{key.value}` given twice", key.start_mark
                )
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


# ---------------------------------------------------------------- environment twins


def env_name(path: Iterable[str]) -> str:
    """`("clusters", "pd", "kind")` → `PRFAAS_CLUSTERS__PD__KIND`."""
    return ENV_PREFIX + "__".join(part.upper().replace("-", "_") for part in path)


def twins(tree: Mapping[str, Any]) -> dict[str, tuple[tuple[str, ...], Any]]:
    """Environment name → (path, type) of every field, over the clusters, workers and links in `tree`."""
    return {env_name(path): (path, kind) for path, kind in _walk_fields(Config, tree, ())}


def _walk_fields(
    kind: type[Section], tree: Any, at: tuple[str, ...]
) -> Iterable[tuple[tuple[str, ...], Any]]:
    tree = tree if isinstance(tree, Mapping) else {}
    for field in msgspec.structs.fields(kind):
        path, below = (*at, field.name), tree.get(field.name)
        named = _named_sections(field.type)
        if named is not None:
            for name, item in below.items() if isinstance(below, Mapping) else ():
                yield from _walk_fields(named, item, (*path, str(name)))
        elif isinstance(field.type, type) and issubclass(field.type, Section):
            yield from _walk_fields(field.type, below, path)
        else:
            yield path, field.type


def is_config_variable(name: str) -> bool:
    """Whether an environment variable is a configuration twin rather than the twin of a command's flag."""
    return name.startswith(ENV_PREFIX) and ("__" in name or name == env_name(["state_dir"]))


def apply_environment(tree: dict[str, Any], environment: Mapping[str, str]) -> None:
    """Write the values of `PRFAAS_…` twins into a raw configuration tree.

    Text fields and quantities take the value as it is, others as YAML (`true`, `3`, `[a, b]`).

    Raises:
        ConfigError: a variable that looks like a path in the configuration and is none.
    """
    known = twins(tree)
    flattened = {name.replace("__", "_"): name for name in known}
    for name, text in sorted(environment.items()):
        if name in known:
            path, kind = known[name]
            _set(tree, path, parse_text(kind, text, f"environment variable {name}"))
        elif is_config_variable(name):
            raise ConfigError(f"unknown environment variable {name}{suggest(name, known)}")
        elif name in flattened:
            raise ConfigError(f"unknown environment variable {name}; did you mean `{flattened[name]}`?")


def parse_text(kind: Any, text: str, source: str) -> Any:
    """What `convert` takes for a field of type `kind` that was written as `text` outside a YAML file.

    Raises:
        ConfigError: no valid YAML; names `source`.
    """
    is_text = (
        kind is str or kind in _QUANTITIES or all(isinstance(item, str) for item in get_args(kind) or [0])
    )
    if is_text:
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {text!r}") from error


def _set(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        child = tree.setdefault(part, {})
        if not isinstance(child, dict):
            return  # wrong type in the file: the conversion says so with its path
        tree = child
    tree[path[-1]] = value


# ---------------------------------------------------------------- worker counts


def expand_counts(config: Config) -> Config:
    """Every worker with `count: n` written out as `name-0` … `name-(n-1)`, fixed ports counting up."""
    clusters = {
        name: msgspec.structs.replace(cluster, workers=_expand(f"clusters.{name}", cluster))
        for name, cluster in config.clusters.items()
    }
    return msgspec.structs.replace(config, clusters=clusters)


def _expand(path: str, cluster: ClusterConfig) -> dict[str, WorkerConfig]:
    workers: dict[str, WorkerConfig] = {}
    for name, worker in cluster.workers.items():
        for copy_name, copy in _copies(name, worker, f"{path}.workers.{name}"):
            if copy_name in workers:
                raise ConfigError(f"`{path}.workers` has two workers called {copy_name}; rename one")
            workers[copy_name] = copy
    return workers


def _copies(name: str, worker: WorkerConfig, path: str) -> list[tuple[str, WorkerConfig]]:
    if worker.count == 1:
        return [(name, worker)]
    if worker.count < 1:
        raise ConfigError(f"`{path}.count` must be at least 1, got {worker.count}")
    if worker.cpus:
        raise ConfigError(
            f"`{path}.cpus` would pin all {worker.count} workers to the same cores; list them one by one"
        )
    return [
        (f"{name}-{i}", msgspec.structs.replace(worker, count=1, port=worker.port + i if worker.port else 0))
        for i in range(worker.count)
    ]
