"""Report pages of real runs in Chromium: they render without warnings and show the numbers of the run."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, WHY_NOT, Browser
from command import Jobs
from events import whole, write_recipe, write_run

from roundelay.report.svg import number

pytestmark = [
    pytest.mark.skipif(not CHROMIUM, reason=WHY_NOT),
    pytest.mark.slow,
    pytest.mark.timeout(240),
]
OUTSIDE = """[...document.querySelectorAll('body *')]
    .filter(e => !e.closest('svg, .scroll') && e.getBoundingClientRect().right > innerWidth + 1)
    .map(e => e.className || e.tagName)"""
SMALLEST = """Math.min(...[...document.querySelectorAll('main svg text')]
    .map(e => e.getBoundingClientRect()).filter(r => r.width).map(r => r.height))"""
FRAMES = "frames"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as started:
        yield started


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two learners on a small task and write the report."""
    folder = tmp_path_factory.mktemp("real")
    with Jobs(folder) as jobs:
        settings = (
            "learners=2",
            "epochs=2",
            "keep_checkpoints=99",
            "log_every_s=0.05",
            "progress=none",
            "run=a",
            "task_options.held_out=64",
        )
        jobs.run("train", FRAMES, *settings, timeout_s=180).expect(0)
        printed = jobs.run("report", "a", "--json", timeout_s=60).expect(0).json
    assert printed["report"] == "a/report.html"
    assert printed["runs"][0]["learners"] == 2
    return folder / "a"


def figure(browser: Browser, name: str) -> str:
    """Return the HTML of a figure after parsing by the browser."""
    return str(browser.run(f"[...document.querySelectorAll('[data-figure={name}]')].map(e => e.outerHTML).join('')"))


def size_of(png: bytes) -> tuple[int, int]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])


@pytest.mark.dist
def test_the_figures_show_the_numbers_of_the_run(run: Path, browser: Browser) -> None:
    browser.problems.clear()
    browser.open(run / "report.html")
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    evaluations = [e for e in events if e["event"] == "evaluation"]
    assert evaluations
    chart = figure(browser, "validation-loss")
    for position in {e["position"] for e in evaluations}:
        last = [e for e in evaluations if e["position"] == position][-1]
        assert f"{number(last['metrics']['loss'])} at {number(position, 3)} samples" in chart
    final = next(e for e in evaluations if e["final"])
    shown = browser.run("document.querySelector('[data-figure=summary]').innerText")
    assert number(final["metrics"]["loss"]) in shown
    assert number(final["metrics"]["accuracy"]) in shown
    counted = sum(n for e in events if e["event"] == "steps" for n in e["staleness"].values())
    stale = sum(e["staleness"].get("0", 0) for e in events if e["event"] == "steps")
    if stale:
        assert f"{number(100 * stale / counted, 3)} % have staleness 0" in figure(browser, "staleness")
    spent = sum(e["seconds"].get("compute", 0) for e in events if e["event"] == "steps" and e["rank"] == 1)
    assert f"rank 1: computing gradients {number(spent, 3)} s" in figure(browser, "time-split")
    mixed = next(e for e in events if e["event"] == "start")["mixing"]
    assert f"weight of rank 1 in the average of rank 0: {number(mixed['weights'][0][2], 3)}" in figure(browser, "mixing")
    gradients = sum(n for e in events if e["event"] == "steps" for n in e.get("exchange_gaps", {}).values())
    exchanges = sum(e["exchanges"] for e in events if e["event"] == "steps")
    shown = browser.run("document.querySelector('[data-figure=exchange-gaps]').innerText")
    assert re.search(rf"exchanges per gradient\s+{re.escape(number(exchanges / gradients, 3))}\s", shown)
    longest = max(e["longest_gap"] for e in events if e["event"] == "summary")
    assert re.search(rf"longest run of gradients without an exchange\s+{longest}\s", shown)
    assert "torch" in browser.run("document.querySelector('[data-figure=details]').innerText")
    assert browser.problems == []


@pytest.mark.dist
@pytest.mark.parametrize(("width", "dark"), [(1400, False), (390, False), (1400, True), (390, True)])
def test_the_page_fits_wide_and_narrow_screens_in_light_and_dark(run: Path, browser: Browser, width: int, dark: bool) -> None:
    browser.problems.clear()
    browser.open(run / "report.html", width, dark=dark)
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run(OUTSIDE) == []
    red, green, blue = map(int, re.findall(r"\d+", browser.run("getComputedStyle(document.body).backgroundColor"))[:3])
    assert (red + green + blue < 200) == dark
    assert browser.run(SMALLEST) >= 6  # legible letters
    picture = browser.screenshot()
    assert size_of(picture)[0] == width
    assert len(picture) > 20_000
    assert browser.problems == []


@pytest.mark.dist
def test_the_page_prints(run: Path, browser: Browser) -> None:
    browser.open(run / "report.html")
    assert browser.print()[:5] == b"%PDF-"


def test_a_recipe_and_a_large_run_with_a_lost_learner(tmp_path: Path, browser: Browser) -> None:
    lost = {"event": "lost", "time": whole(24)[-1]["time"], "rank": 0, "lost": 5, "why": "its process has ended"}
    spoken = write_recipe(tmp_path / "spoken", whole(3))
    large = write_run(tmp_path / "a-run-with-quite-a-long-name-that-does-not-fit", [*whole(24), lost])
    with Jobs(tmp_path) as jobs:
        jobs.run("report", str(spoken), str(large), timeout_s=60).expect(0)
    browser.problems.clear()
    for width in (1400, 390):
        browser.open(tmp_path / "report.html", width)
        assert browser.run("document.documentElement.scrollWidth") <= width
    assert "5.00" in browser.run("document.querySelector('[data-figure=wer]').innerText")
    confusions = browser.run("document.querySelector('[data-figure=confusions]').innerText")
    assert re.search(r"yes\s+yeast\s+2", confusions)
    assert "lost" in browser.run("document.querySelector('[data-figure=time-split]').innerText")
    assert browser.problems == []
    shutil.rmtree(spoken)
