"""`write_report`: the page, the pictures and the JSON behind them in one folder, whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from prfaas.errors import ConfigError
from simulations.report.comparison import comparison_charts
from simulations.report.conclude import Finding, conclude, ranking
from simulations.report.inside import inside_charts
from simulations.report.page import render_page
from simulations.report.pictures import write_pictures
from simulations.report.samples import sample_rows
from simulations.report.study import Study
from simulations.report.summary import summarize

PAGE = "index.html"
DATA = "report.json"


def write_report(folder: Path, study: Study) -> Path:
    """Write the report of `study` and return the page's path. Same study, same bytes.

    `folder` appears, or is replaced if it holds a report, only once everything is written. It gets
    `index.html`, `report.json` and PNGs: of the charts that compare, and of those inside the best run.

    Raises:
        ConfigError: the folder holds something else, or cannot be made; or a package is missing.
    """
    check_folder(folder)
    folder = folder.absolute()
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write(temporary, best_first(study))
        if folder.exists():
            shutil.rmtree(folder)
        temporary.chmod(0o755)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder / PAGE


def check_folder(folder: Path) -> None:
    """Before hours of simulation: could the report be written there?

    Raises:
        ConfigError: as `write_report`.
    """
    if not folder.absolute().parent.is_dir():
        raise ConfigError(f"--report: there is no folder {folder.absolute().parent}; make it first")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / DATA).is_file():
        raise ConfigError(f"--report: {folder} holds other things than a report; name a new folder")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--report: {folder} is a file; name a folder")
    for package in ("matplotlib", "plotly"):
        if find_spec(package) is None:
            raise ConfigError(f"--report needs the package {package}: pip install 'prfaas[simulate]'")


def report_data(study: Study) -> tuple[dict[str, Any], list[dict[str, Any]], list[Finding]]:
    """(what report.json holds, the summary of each run, the findings)."""
    summaries = [summarize(run, study.fleet, study.bound_rps) for run in study.runs]
    for summary in summaries:
        summary.pop("cpu_s")  # the only figure that equal seeds do not reproduce
        if summary["policy"] in study.capacity_rps:
            summary["capacity_rps"] = study.capacity_rps[summary["policy"]]
    findings = conclude(study, summaries)
    data = {
        "command": study.command,
        "fleet": study.fleet,
        "bound": {"rps": study.bound_rps, "runs_out_first": study.binding},
        "findings": findings,
        "charts": comparison_charts(study, summaries),
        "runs": [
            {"summary": summary, "charts": inside_charts(run), "requests": sample_rows(run)}
            for run, summary in zip(study.runs, summaries, strict=True)
        ],
    }
    return data, summaries, findings


def best_first(study: Study) -> Study:
    """The same study with its runs in order of merit; colours and charts follow that order."""
    order = ranking([summarize(run, study.fleet) for run in study.runs])
    return replace(study, runs=tuple(study.runs[index] for index in order))


def _write(folder: Path, study: Study) -> None:
    data, summaries, findings = report_data(study)
    encoded = msgspec.json.encode(data, enc_hook=float)  # the fleet's quantities are floats with units
    folder.joinpath(DATA).write_bytes(encoded)
    page = render_page(study, summaries, findings, encoded.decode())
    folder.joinpath(PAGE).write_text(page, encoding="utf-8")
    write_pictures(folder, [*data["charts"], *data["runs"][0]["charts"]])
