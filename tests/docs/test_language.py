"""The language of code, tests and documentation: no banned word, no participle as a variable, no class name used twice."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest
from language import violations
from paths import ROOT

PROSE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
FOLDERS = ("src", "tests", "benchmarks", "examples", "docs")
FILES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".md") and path.name not in ("language.py", "test_language.py") and ".egg-info" not in str(path)
)
EXCEPTIONS_AT_MOST = 10


@pytest.mark.parametrize("path", PROSE + FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_uses_the_words_of_the_field(path: Path) -> None:
    assert violations(path) == []


def test_exceptions_are_rare() -> None:
    lines = [line for path in PROSE + FILES for line in path.read_text(encoding="utf-8").splitlines()]
    marked = [line for line in lines if "language: ok" in line]
    assert len(marked) <= EXCEPTIONS_AT_MOST, marked


def test_no_class_name_is_used_twice() -> None:
    names = Counter(
        node.name
        for path in (ROOT / "src" / "roundelay").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", '"""Whoever comes first."""'),
        ("a.py", "found = 1"),
        ("a.py", "# a dice"),
        ("a.py", "def f(given): ..."),
        ("a.md", "The neighbour answers."),
        ("a.md", "It is done anew."),
    ],
)
def test_a_violation_is_reported(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert len(violations(path)) == 1
