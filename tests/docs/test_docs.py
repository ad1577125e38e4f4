"""The documentation says what the code does: pages, settings, links and metrics are compared with the source."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from paths import ROOT

from roundelay import topology
from roundelay.config import TrainConfig
from roundelay.strategies import STRATEGIES, describe

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """The anchors that headings make, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(found), f"{page.name} links to {target}, which has {sorted(anchors(found))}"


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_has_a_page_that_names_its_settings_and_traits(name: str) -> None:
    text = (ROOT / "docs" / "strategies" / f"{name}.md").read_text()
    said = describe(name)
    for setting in said["settings"]:
        assert f"`{setting}`" in text, setting
    for title in ("## Who sends what, when", "## When to use it", "## What to set", "## Known weaknesses", "## Traits"):
        assert title in text
    if name != "hierarchical":  # it has those of the strategy between its machines
        row = text.splitlines()[-1]
        assert row.split("|")[1].split()[0] == said["traits"]["sharding"]
        assert ("no" if not said["traits"]["survives_failures"] else "yes") in row.split("|")[5]
        assert row.split("|")[6].strip().startswith(said["traits"]["optimizer_state"])


def test_the_readme_lists_every_strategy() -> None:
    text = (ROOT / "README.md").read_text()
    assert re.findall(r"^\| \[(\w+)\]\(docs/strategies/\1\.md\)", text, re.MULTILINE) == list(STRATEGIES)


def test_the_table_of_settings_is_complete_and_has_the_defaults() -> None:
    rows = re.findall(r"^\| ((?:`\w+` ?)+)\| (.*?) \|", (ROOT / "docs" / "run.md").read_text(), re.MULTILINE)
    said: dict[str, str] = {}
    for names, defaults in rows:
        keys, values = re.findall(r"`(\w+)`", names), defaults.replace("`", "").split()
        said |= dict(zip(keys, values if len(values) == len(keys) else [""] * len(keys), strict=True))
    for field in fields(TrainConfig):
        assert field.name in said, field.name
        if said.get(field.name) and field.name != "run":
            default = getattr(TrainConfig(), field.name)
            written = said[field.name]
            assert written == default if isinstance(default, str) else json.loads(written) == default, field.name


def test_the_table_of_topologies_is_what_the_command_prints() -> None:
    lines = [
        line.split("|")[1:-1] for line in (ROOT / "docs" / "topologies.md").read_text().splitlines() if line.startswith("|")
    ]
    rows = [[cell.strip() for cell in line] for line in lines if len(line) == 7]
    names = [cell.strip("`") for cell in rows[0][2:]]
    assert names == list(topology.TOPOLOGIES)
    size, checked = 0, 0
    for row in rows[2:]:
        size = int(row[0]) if row[0] else size
        key = {"contraction": "contraction", "gap": "gap", "rounds to 1 %": "rounds_to_1_percent"}[row[1]]
        for name, cell in zip(names, row[2:], strict=True):
            assert round(topology.describe(name, size)[key], 4) == float(cell), (size, name, key)
            checked += 1
    assert checked == 4 * 3 * len(names)


def test_the_spread_that_mixing_leaves_is_computed_from_the_contraction() -> None:
    text = (ROOT / "docs" / "explanation" / "convergence.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert len(rows) >= 5
    for size, *metrics in rows:
        said = [tuple(metrics[:2]), tuple(metrics[2:])]
        found = [topology.contraction(name, int(size)) for name in ("ring", "random_ring")]
        assert said == [(f"{c:.3f}", f"{c / (1 - c):.1f}") for c in found]
