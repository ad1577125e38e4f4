"""Write settings: as TOML that loads back, and as a table of resolved values with their origins."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from roundelay.config.loader import ResolvedConfig
from roundelay.core.settings import key_of


def dumps(settings: Any) -> str:
    """Return TOML text from which `load` restores an equal dataclass. None values are left out."""
    return "\n".join(_section(tree_of(settings), "")).lstrip("\n") + "\n"


def _section(tree: Mapping[str, Any], section: str) -> list[str]:
    inner = {key: value for key, value in tree.items() if _is_section(value) or _is_section_list(value)}
    lines = [f"{_key(key)} = {toml_value(value)}" for key, value in tree.items() if key not in inner]
    for key, value in inner.items():
        name = f"{section}.{_key(key)}" if section else _key(key)
        for row in value if isinstance(value, list) else [value]:
            lines += ["", f"[[{name}]]" if isinstance(value, list) else f"[{name}]", *_section(row, name)]
    return lines


def _is_section(value: Any) -> bool:
    return isinstance(value, dict) and bool(value)


def _is_section_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def toml_value(value: Any) -> str:
    """Return one value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {toml_value(inner)}" for key, inner in value.items()) + "}"
    # TOML's basic strings take the escapes of JSON, except a bare DEL and surrogate pairs
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def tree_of(settings: Any) -> dict[str, Any]:
    """Return a dataclass as nested dicts and lists, by the keys of files."""
    tree: dict[str, Any] = {}
    for f in fields(settings):
        value = getattr(settings, f.name)
        if f.init and value is not None and not f.metadata.get("hidden"):
            tree[key_of(f)] = _plain(value)
    return tree


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return tree_of(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items() if inner is not None}
    return str(value) if isinstance(value, Path) else value


def resolved_rows(resolved: ResolvedConfig[Any]) -> dict[str, dict[str, Any]]:
    """Return {dotted key: {"value": …, "from": origin}} for all settings, defaults included."""
    tree = tree_of(resolved.settings)
    for f in fields(resolved.settings):
        schema = f.metadata.get("schema")
        if schema is not None:  # show the defaults of the keys that are not set
            values = schema(**getattr(resolved.settings, f.name))
            tree[key_of(f)] = {k: v for k, v in tree_of(values).items() if k not in f.metadata["reserved"]}
    return {key: {"value": value, "from": resolved.origin(key)} for key, value in flatten(tree).items()}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested sections as dotted keys; `name[1].key` for the second element of a list of sections."""
    rows: dict[str, Any] = {}
    for key, value in tree.items():
        if _is_section(value):
            rows |= flatten(value, f"{prefix}{key}.")
        elif _is_section_list(value):
            for number, row in enumerate(value):
                rows |= flatten(row, f"{prefix}{key}[{number}]." if number else f"{prefix}{key}.")
        else:
            rows[f"{prefix}{key}"] = value
    return rows


def explain(resolved: ResolvedConfig[Any]) -> str:
    """Return one line `key = value  # origin` per setting."""
    rows = {key: (toml_value(row["value"]), row["from"]) for key, row in resolved_rows(resolved).items()}
    key_width, value_width = max(map(len, rows)), max(len(value) for value, _ in rows.values())
    return "\n".join(f"{key:<{key_width}} = {value:<{value_width}}  # {origin}" for key, (value, origin) in rows.items())
