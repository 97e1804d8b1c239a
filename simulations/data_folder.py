"""Where the public traces and cost tables lie: they are no part of the project.

`PRFAAS_DATA` names the folder; without it, `shared` beside the checkout is tried. It holds `traces/` and
`cost/`. Everything but the cost tables and the recorded traces works without it.
"""

from __future__ import annotations

import os
from pathlib import Path

from prfaas.errors import ConfigError

VARIABLE = "PRFAAS_DATA"


def data_folder() -> Path | None:
    """The folder that holds `traces/` and `cost/`; None where there is none.

    Raises:
        ConfigError: `PRFAAS_DATA` names something that is no folder.
    """
    named = os.environ.get(VARIABLE)
    if named:
        folder = Path(named)
        if not folder.is_dir():
            raise ConfigError(f"{VARIABLE} is {named}, which is no folder; it should hold traces/ and cost/")
        return folder
    beside = Path(__file__).resolve().parent.parent.parent / "shared"
    return beside if (beside / "cost").is_dir() or (beside / "traces").is_dir() else None


def data_file(name: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """The file `name` (as `cost/aic_decode.csv.gz`) of the data folder, or of `folder` where that is given.

    Raises:
        ConfigError: there is no data folder, or no such file in it.
    """
    root = Path(folder) if folder is not None else data_folder()
    if root is None:
        raise ConfigError(f"{name} is needed, and there is no data folder; set {VARIABLE} to where it lies")
    path = root / name
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; set {VARIABLE} to the folder that holds {name}")
    return path
