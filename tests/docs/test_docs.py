"""Links, settings, traits and computed tables of the documentation agree with the code."""

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
    """Return the anchors of the headings, as GitHub derives them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_have_targets(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}, which has {sorted(anchors(file))}"


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_has_a_page_with_its_settings_and_traits(name: str) -> None:
    text = (ROOT / "docs" / "strategies" / f"{name}.md").read_text()
    description = describe(name)
    for setting in description["settings"]:
        assert f"`{setting}`" in text, setting
    for title in ("## Communication", "## When to use it", "## Settings", "## Measured", "## Known weaknesses", "## Traits"):
        assert title in text
    if name != "hierarchical":  # it has the traits of the strategy between its nodes
        traits = description["traits"]
        cells = [cell.strip() for cell in text.splitlines()[-1].split("|")[1:-1]]
        assert cells[0].split()[0] == traits["sharding"]
        for cell, trait in zip(cells[1:5], ("deterministic", "conserves_mean", "contracts", "survives_failures"), strict=True):
            assert cell.startswith("yes" if traits[trait] else "no"), trait
        assert cells[5].startswith(traits["optimizer_state"])


def test_the_readme_lists_every_strategy() -> None:
    text = (ROOT / "README.md").read_text()
    assert re.findall(r"^\| \[(\w+)\]\(docs/strategies/\1\.md\)", text, re.MULTILINE) == list(STRATEGIES)


def test_the_reference_lists_every_setting() -> None:
    text = (ROOT / "docs" / "reference" / "settings.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == sorted(field.name for field in fields(TrainConfig))


def test_the_first_settings_have_their_defaults() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", (ROOT / "docs" / "run.md").read_text(), re.MULTILINE)
    documented = {key: text.strip("`") for key, text in rows if key in {field.name for field in fields(TrainConfig)}}
    assert {"strategy", "topology", "learners", "batch", "lr", "epochs", "run", "resume"} <= set(documented)
    for key, text in documented.items():
        default = getattr(TrainConfig(), key)
        if key != "run":  # a name that is chosen by the command
            assert text == default if isinstance(default, str) else json.loads(text) == default, key


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
        cells = [tuple(metrics[:2]), tuple(metrics[2:])]
        factors = [topology.contraction(name, int(size)) for name in ("ring", "random_ring")]
        assert cells == [(f"{c:.3f}", f"{c / (1 - c):.1f}") for c in factors]
