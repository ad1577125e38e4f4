"""Configuration: one loader of TOML files and key=value pairs."""

from roundelay.config.loader import (
    CHOICES,
    MINIMUM,
    NON_NUMERIC_KEYS,
    TABLES,
    ResolvedConfig,
    TrainConfig,
    build_task,
    check,
    computation_settings,
    dumps,
    engine,
    explain,
    extend_sys_path,
    load,
)

__all__ = [
    "CHOICES",
    "MINIMUM",
    "NON_NUMERIC_KEYS",
    "TABLES",
    "ResolvedConfig",
    "TrainConfig",
    "build_task",
    "check",
    "computation_settings",
    "dumps",
    "engine",
    "explain",
    "extend_sys_path",
    "load",
]
