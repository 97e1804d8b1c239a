"""Traces that come as many files: a folder, or a tar file (plain, gzip or zstd)."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

from prfaas.errors import ConfigError
from simulations.workload.files import chunks


def members(path: Path, ending: str, begins: str = "") -> Iterator[tuple[str, bytes]]:
    """(name below `path`, contents) of every file whose name has `begins` in front and `ending` at its end.

    In order of name. Names in an archive lose a leading `./`.

    Raises:
        ConfigError: nothing of the kind in it, or it is damaged.
    """
    names = [name for name in member_names(path) if name.endswith(ending) and name.startswith(begins)]
    if not names:
        raise ConfigError(f"{path} holds no {begins}*{ending}")
    if path.is_dir():
        for name in names:
            yield name, b"".join(chunks(path / name))
        return
    with _open(path) as archive:
        found = {_plain_name(member): member for member in archive.getmembers()}
        for name in names:
            file = archive.extractfile(found[name])
            assert file is not None  # member_names lists files only
            yield name, file.read()


def member_names(path: Path) -> list[str]:
    """Names of the files below a folder or in an archive, sorted.

    Raises:
        ConfigError: it is damaged or unreadable.
    """
    if path.is_dir():
        return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    with _open(path) as archive:
        return sorted(_plain_name(member) for member in archive.getmembers() if member.isfile())


def _open(path: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(fileobj=io.BytesIO(b"".join(chunks(path))), mode="r:")
    except tarfile.TarError as error:
        raise ConfigError(f"{path} is no tar archive, or damaged: {error}") from error


def _plain_name(member: tarfile.TarInfo) -> str:
    return member.name.removeprefix("./")
