"""Find out whether an argument is a file of training settings or a recipe."""

from __future__ import annotations

import tomllib
from pathlib import Path

RECIPE_KEYS = {"source", "kaldi", "network"}


def is_recipe(name: str) -> bool:
    """Return whether a path or a name refers to a recipe. Files win over names, examples over recipes."""
    from roundelay.testing import examples

    path = Path(name)
    if path.is_dir():
        return (path / "recipe.toml").is_file() or name not in examples.names()
    if path.is_file():
        try:
            return bool(RECIPE_KEYS & set(tomllib.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, RecursionError):
            return False  # the loader reports what is wrong
    return name not in examples.names() and (Path(__file__).parents[1] / "recipes" / name / "recipe.toml").is_file()
