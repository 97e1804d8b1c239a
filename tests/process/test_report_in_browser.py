"""A written report in a real headless Chromium: every plot is drawn, nothing fetched, nothing complains."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from browser import Page, browser_page, find_browser
from run_results import make_fleet, make_result

from simulations.report.study import Study
from simulations.report.write import write_report

pytestmark = pytest.mark.process

ODD_NAME = "</script><b>odd & name"
DRAWN = """
[...document.querySelectorAll('figure')].map((figure) => ({
  key: figure.dataset.key,
  marks: [...figure.querySelectorAll('.scatterlayer path, .barlayer path')]
    .filter((mark) => mark.getBBox().width > 0 || mark.getBBox().height > 0).length,
  inside: (() => {
    const plot = figure.querySelector('.main-svg').getBoundingClientRect();
    const frame = figure.getBoundingClientRect();
    return plot.left >= frame.left - 1 && plot.right <= frame.right + 1;
  })(),
}))
"""
SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of three policies with every part that a report can have."""
    runs = (
        make_result("cost_model", requests=1200),
        make_result("threshold:tokens=8000", requests=1200, slowness=1.5, refused=0.01),
        make_result(ODD_NAME, requests=1200, slowness=2.0),
    )
    capacity = {"cost_model": 5.9, "threshold:tokens=8000": 5.1}
    study = Study(make_fleet(), runs, 7.0, "prefill seconds of pd", capacity, "prfaas simulate compare …")
    return write_report(tmp_path_factory.mktemp("reports") / "three", study)


@pytest_asyncio.fixture
async def page() -> AsyncIterator[Page]:
    browser = find_browser()
    if browser is None:
        pytest.skip("no chromium is installed (as root on Debian, `make browser` installs it)")
    async with browser_page(browser) as opened:
        yield opened


async def test_every_plot_is_drawn_in_its_frame_without_errors_or_network(report: Path, page: Page) -> None:
    await page.open(report.as_uri(), width=1400)
    keys = await _check_drawn(page)
    assert {"ttft", "tpot", "capacity", "placement", "bound", "cost", "regret"} <= keys
    assert {"mix", "stages", "links", "queues", "caches", "prediction"} <= keys
    # Names are text, never markup.
    names = await page.ask("[...document.querySelectorAll('.tabs button')].map((tab) => tab.textContent)")
    assert ODD_NAME in names
    # Another tab is another run.
    rows = "[...document.querySelectorAll('#requests tbody tr')].map((row) => row.innerText)"
    first = await page.ask(rows)
    await page.ask("document.querySelectorAll('.tabs button')[1].click()")
    second = await page.ask(rows)
    assert len(first) > 20
    assert len(second) > 20
    assert first != second
    assert page.errors == []
    assert page.requests == [report.as_uri()]


async def test_a_narrow_dark_screen_gets_all_of_it_and_can_turn_on_the_light(
    report: Path, page: Page
) -> None:
    await page.open(report.as_uri(), width=420, dark=True)
    await _check_drawn(page)
    assert await page.ask(SIDEWAYS) <= 0
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = await page.ask(ground)
    await page.ask("document.getElementById('theme').click()")
    assert await page.ask(ground) != dark
    await _check_drawn(page)
    assert page.errors == []


async def _check_drawn(page: Page) -> set[str]:
    """Keys of the page's plots, each of which has marks and stays inside its frame."""
    assert await page.ask("document.documentElement.dataset.ready") == "yes"
    figures = await page.ask(DRAWN)
    assert [figure for figure in figures if not figure["marks"] or not figure["inside"]] == []
    return {figure["key"] for figure in figures}
