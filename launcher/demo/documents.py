"""Long texts that every machine with Python and this project has: the library's sources, licence texts."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

_MODULES = (
    "argparse", "ast", "bisect", "calendar", "cmd", "codecs", "collections/__init__", "configparser",
    "contextlib", "copy", "csv", "dataclasses", "difflib", "dis", "enum", "filecmp", "fnmatch", "fractions",
    "functools", "getopt", "getpass", "glob", "graphlib", "gzip", "heapq", "inspect", "ipaddress",
    "json/decoder", "keyword", "locale", "mailbox", "netrc", "numbers", "operator", "os", "pathlib", "pdb",
    "pickle", "plistlib", "pprint", "profile", "queue", "quopri", "random", "reprlib", "sched", "selectors",
    "shelve", "shlex", "shutil", "signal", "socketserver", "statistics", "string", "subprocess", "tarfile",
    "tempfile", "textwrap", "threading", "timeit", "tokenize", "trace", "types", "typing", "uuid", "wave",
    "weakref", "zipapp", "zipfile",
)  # fmt: skip
_MIN_LICENCE_CHARS = 6000


@dataclass(frozen=True, slots=True)
class Document:
    """A text and what to call it."""

    title: str
    text: str


def load_documents(seed: int) -> list[Document]:
    """Sources and licence texts of this machine in an order that depends on `seed` only.

    Raises:
        FileNotFoundError: the Python library's sources are not installed.
    """
    library = Path(sysconfig.get_path("stdlib"))
    sources = [
        Document(f"the Python module {name.removesuffix('/__init__').replace('/', '.')}", _read(path))
        for name in _MODULES
        if (path := library / f"{name}.py").is_file()
    ]
    if not sources:
        raise FileNotFoundError(f"{library} holds none of the Python library's sources")
    documents = sources + list(_licences())
    Random(seed).shuffle(documents)
    return documents


def _licences() -> Iterator[Document]:
    """Licence texts that installed packages carry, one per different text."""
    seen: set[str] = set()
    for package in sorted(distributions(), key=lambda package: package.name or ""):
        for file in package.files or ():
            if "LICENSE" not in file.name.upper() or file.suffix in {".py", ".pyc"}:
                continue
            path = Path(str(file.locate()))
            text = _read(path) if path.is_file() else ""
            if len(text) >= _MIN_LICENCE_CHARS and text[:_MIN_LICENCE_CHARS] not in seen:
                seen.add(text[:_MIN_LICENCE_CHARS])
                yield Document(f"the licence of {package.name}", text)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def cut(text: str, tokens: int, tokenizer: Tokenizer) -> str:
    """The start of `text`, as many whole lines as fit into `tokens` tokens (at least one line)."""
    start = text[: 8 * tokens]
    offsets = tokenizer.encode(start, add_special_tokens=False).offsets
    end = len(start) if len(offsets) <= tokens else offsets[tokens - 1][1]
    line_end = text.rfind("\n", 0, end)
    return text[: line_end if line_end > 0 else end]
