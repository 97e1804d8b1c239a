"""What `--report` and `--out` leave behind: whole, the same for the same runs, and nothing beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from run_results import make_fleet, make_result

from prfaas.errors import ConfigError
from simulations.report import write
from simulations.report.rows import check_rows_path, write_rows
from simulations.report.study import Study
from simulations.report.write import check_folder, write_report


def study() -> Study:
    runs = (make_result("slow", requests=300, slowness=1.6), make_result("quick </script>", requests=300))
    return Study(make_fleet(), runs, 7.0, "prefill")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(tmp_path_factory.mktemp("reports") / "one", study()).parent


def test_a_report_is_a_page_its_data_and_a_picture_per_chart_of_comparison_and_best_run(folder: Path) -> None:
    data = json.loads((folder / "report.json").read_text())
    charts = [chart["key"] for chart in (*data["charts"], *data["runs"][0]["charts"])]
    pictures = {path.name for path in folder.glob("*.png")}
    assert pictures == {f"{key}.png" for key in charts}
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    assert {path.name for path in folder.iterdir()} == {"index.html", "report.json", *pictures}
    assert [run["summary"]["policy"] for run in data["runs"]] == ["quick </script>", "slow"]
    assert data["findings"][0]["head"].startswith("quick")


def test_the_page_needs_nothing_from_elsewhere(folder: Path) -> None:
    page = (folder / "index.html").read_text()
    own = page.replace(re.findall(r"<script>(.*?)</script>", page, re.S)[0], "")  # all but plotly itself
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)""", own)
    assert "http" not in own
    assert "@import" not in own


def test_data_cannot_end_the_script_that_carries_it(folder: Path) -> None:
    page = (folder / "index.html").read_text()
    carried = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert carried
    assert json.loads(carried[1])["runs"][0]["summary"]["policy"] == "quick </script>"


def test_equal_studies_give_equal_bytes(folder: Path, tmp_path: Path) -> None:
    again = write_report(tmp_path / "again", study()).parent
    for path in folder.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name


def test_an_error_leaves_the_former_report_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = tmp_path / "report"
    former.mkdir()
    (former / "report.json").write_text("{}")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(write, "write_pictures", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report(former, study())
    assert [path.name for path in tmp_path.iterdir()] == ["report"]
    assert (former / "report.json").read_text() == "{}"


def test_a_folder_of_other_things_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="holds other things"):
        check_folder(tmp_path)
    with pytest.raises(ConfigError, match="make it first"):
        check_folder(tmp_path / "no" / "such")
    with pytest.raises(ConfigError, match="is a file"):
        check_folder(tmp_path / "thesis.txt")
    check_folder(tmp_path / "new")


def test_rows_are_the_same_in_both_formats(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    run = make_result(requests=50, failed=3)
    write_rows(tmp_path / "rows.jsonl", run)
    write_rows(tmp_path / "rows.parquet", run)
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    table = parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert sorted(lines[0]) == sorted(table[0])
    for line, row in zip(lines, table, strict=True):
        assert {key: row[key] for key in line} == line
    assert lines[0]["ttft_s"] is None
    assert lines[10]["ttft_s"] == pytest.approx(float(run.ttft_s[10]))
    assert np.sum([line["kv_bytes"] for line in lines]) == run.kv_bytes.sum()


def test_an_unknown_ending_of_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.parquet or \.jsonl"):
        check_rows_path(tmp_path / "rows.csv")
