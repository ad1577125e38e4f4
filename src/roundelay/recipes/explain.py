"""A recipe with every setting resolved, and where each came from."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from roundelay import config
from roundelay.recipes import config as recipe_config
from roundelay.recipes.config import FILE, SECTIONS, TOLD_BY_THE_RECIPE, Recipe
from roundelay.speech.synth.corpus import SynthOptions


def resolved(where: str, overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """key -> value and where it is from: default, the recipe's file, the command line."""
    recipe = recipe_config.load(where, list(overrides))
    path = Path(where) / FILE if Path(where).is_dir() else Path(where)
    written = set(flat(tomllib.loads(path.read_text(encoding="utf-8"))))
    typed = {item.partition("=")[0] for item in overrides}
    rows: dict[str, dict[str, Any]] = {}
    for key, value in flat(as_tree(recipe)).items():
        origin = "command line" if key in typed else path.name if key in written else "default"
        rows[key] = {"value": value, "from": origin}
    return rows


def as_tree(recipe: Recipe) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for f in fields(recipe):
        value = getattr(recipe, f.name)
        if f.name == "folder" or value is None:
            continue
        if f.name == "sources":
            for number, source in enumerate(value):
                tree["source" if number == 0 else f"source {number + 1}"] = {
                    k.name: getattr(source, k.name) for k in fields(source)
                }
        elif f.name == "train":
            engine = config.TrainConfig(**value)
            tree["train"] = {k.name: getattr(engine, k.name) for k in fields(engine) if k.name not in TOLD_BY_THE_RECIPE}
        elif is_dataclass(value):
            tree[f.name] = {k.name: getattr(value, k.name) for k in fields(value)}
        else:
            tree[f.name] = value
    return tree


def flat(tree: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys; of a list of tables the first has no number."""
    rows: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            rows |= flat(value, f"{before}{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for number, one in enumerate(value):
                rows |= flat(one, f"{before}{key}." if number == 0 else f"{before}{key} {number + 1}.")
        else:
            rows[f"{before}{key}"] = list(value) if isinstance(value, tuple) else value
    return rows


def keys() -> list[str]:
    """Every key that a recipe may have, dotted; for completion."""
    found = [f.name for f in fields(Recipe) if f.name not in ("folder", "sources", "train", *SECTIONS)]
    found += ["source.kind", "source.root", *(f"source.options.{f.name}" for f in fields(SynthOptions))]
    found += [f"train.{f.name}" for f in fields(config.TrainConfig) if f.name not in TOLD_BY_THE_RECIPE]
    for name, kind in SECTIONS.items():
        found += [f"{name}.{f.name}" for f in fields(kind)]
    return found


def as_json(where: str, overrides: Sequence[str]) -> str:
    return json.dumps(resolved(where, overrides), indent=1)


def as_text(where: str, overrides: Sequence[str]) -> str:
    rows = {key: (json.dumps(row["value"]), row["from"]) for key, row in resolved(where, overrides).items()}
    wide, far = max(map(len, rows)), max(len(value) for value, _ in rows.values())
    return "\n".join(f"{key:<{wide}} = {value:<{far}}  # {origin}" for key, (value, origin) in rows.items())
