"""The strategies, one file each. A new one is a file and a line in this table."""

from __future__ import annotations

import importlib
import re
from dataclasses import MISSING, fields
from typing import Any

from roundelay.errors import UsageError, did_you_mean
from roundelay.strategies.adpsgd import ADPSGD
from roundelay.strategies.asgd import ASGD
from roundelay.strategies.base import Strategy
from roundelay.strategies.bmuf import BMUF
from roundelay.strategies.delay_by_one import DelayByOne
from roundelay.strategies.dpsgd import DPSGD
from roundelay.strategies.hierarchical import Hierarchical
from roundelay.strategies.kstep import KStep
from roundelay.strategies.single import Single
from roundelay.strategies.sync import Sync

STRATEGIES: dict[str, type[Any]] = {
    "single": Single,
    "sync": Sync,
    "asgd": ASGD,
    "kstep": KStep,
    "bmuf": BMUF,
    "dpsgd": DPSGD,
    "adpsgd": ADPSGD,
    "delay_by_one": DelayByOne,
    "hierarchical": Hierarchical,
}


def build(name: str, options: dict[str, Any] | None = None) -> Strategy:
    """A strategy by name (`kstep`), nested (`hierarchical(adpsgd)`), or out of the tree (`my.module:Mine`)."""
    options = dict(options or {})
    nested = re.fullmatch(r"\s*hierarchical\s*(?:\((.*)\))?\s*", name)
    if nested:
        return Hierarchical(outer=build(nested[1] or "adpsgd", options))
    cls = find(name.strip())
    settings = {f.name: f for f in fields(cls) if f.init}
    for key in options:
        if key not in settings:
            raise UsageError(
                f"strategy '{name}' has no setting '{key}'",
                where=f"strategy_options.{key}",
                hint=did_you_mean(key, settings) if settings else "it has no settings: leave the key out",
            )
    made: Strategy = cls(**options)
    return made


def find(name: str) -> type[Any]:
    """The class behind a name."""
    if name in STRATEGIES:
        return STRATEGIES[name]
    if ":" not in name:
        raise UsageError(f"there is no strategy '{name}'", where="strategy", hint=did_you_mean(name, STRATEGIES))
    module, _, attribute = name.partition(":")
    try:
        found: type[Any] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"strategy '{name}' cannot be loaded: {error}", where="strategy", hint="give importable.module:Class"
        ) from error
    return found


def describe(name: str) -> dict[str, Any]:
    """What `roundelay list strategies` shows of one."""
    cls = find(name)
    made = build(name)
    settings = {f.name: f.default for f in fields(cls) if f.init and f.default is not MISSING}
    return {
        "equation": cls.equation,
        "reference": cls.reference,
        "use": cls.advice,
        "weakness": cls.weakness,
        "settings": settings,
        "traits": {f.name: getattr(made.traits, f.name) for f in fields(made.traits)},
    }
