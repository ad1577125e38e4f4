"""Configuration: TOML files and key=value items into dataclasses, and back."""

from roundelay.config.loader import (
    COMMAND_LINE,
    ResolvedConfig,
    apply,
    build,
    check_partial,
    load,
    parse_item,
    read_toml,
    split_items,
)
from roundelay.config.task import NON_NUMERIC_KEYS, build_task, computation_settings, extend_sys_path
from roundelay.config.writer import dumps, explain, flatten, resolved_rows, tree_of
from roundelay.engine.config import EngineConfig, TrainConfig

__all__ = [
    "COMMAND_LINE",
    "NON_NUMERIC_KEYS",
    "EngineConfig",
    "ResolvedConfig",
    "TrainConfig",
    "apply",
    "build",
    "build_task",
    "check_partial",
    "computation_settings",
    "dumps",
    "explain",
    "extend_sys_path",
    "flatten",
    "load",
    "parse_item",
    "read_toml",
    "resolved_rows",
    "split_items",
    "tree_of",
]
