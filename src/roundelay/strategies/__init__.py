"""The strategies, one file each. A new one is a file and a line in this table."""

from __future__ import annotations

import importlib
import re
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from roundelay.errors import UsageError, did_you_mean
from roundelay.strategies.adaptive_kstep import AdaptiveKStep
from roundelay.strategies.adpsgd import ADPSGD
from roundelay.strategies.asgd import ASGD
from roundelay.strategies.base import Strategy
from roundelay.strategies.bmuf import BMUF
from roundelay.strategies.delay_by_one import DelayByOne
from roundelay.strategies.dpsgd import DPSGD
from roundelay.strategies.hierarchical import Hierarchical
from roundelay.strategies.kaldi_averaging import KaldiAveraging
from roundelay.strategies.kstep import KStep
from roundelay.strategies.single import Single
from roundelay.strategies.sync import Sync

STRATEGIES: dict[str, type[Any]] = {
    "single": Single,
    "sync": Sync,
    "asgd": ASGD,
    "kstep": KStep,
    "adaptive_kstep": AdaptiveKStep,
    "kaldi_averaging": KaldiAveraging,
    "bmuf": BMUF,
    "dpsgd": DPSGD,
    "adpsgd": ADPSGD,
    "delay_by_one": DelayByOne,
    "hierarchical": Hierarchical,
}
DEFAULT_OUTER = "adpsgd"
HIERARCHICAL = re.compile(r"\s*hierarchical\s*(?:\((.*)\))?\s*")


def build(name: str, options: dict[str, Any] | None = None, defaults: dict[str, Any] | None = None) -> Strategy:
    """Build a strategy by name (`kstep`), nested (`hierarchical(adpsgd)`), or from a module (`my.module:Mine`).

    `options` are its settings, in a hierarchy those of the outer strategy. `defaults` apply only to settings that it has.
    Raises UsageError for an unknown name or setting.
    """
    options = dict(options or {})
    nested = HIERARCHICAL.fullmatch(name)
    if nested:
        return Hierarchical(outer=build(nested[1] or DEFAULT_OUTER, options, defaults))
    cls = find(name.strip())
    settings = {f.name: f for f in fields(cls) if f.init}
    for key in options:
        if key not in settings:
            raise UsageError(
                f"strategy '{name}' has no setting '{key}'",
                where=f"strategy_options.{key}",
                hint=did_you_mean(key, settings) if settings else "remove the key: this strategy has no settings",
            )
    try:
        strategy: Strategy = cls(**{key: value for key, value in (defaults or {}).items() if key in settings} | options)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"strategy '{name}' does not accept its options: {error}",
            where="strategy_options",
            hint="roundelay list strategies",
        ) from error
    return strategy


def find(name: str) -> type[Any]:
    """Return the class of a strategy. Raises UsageError if there is none."""
    if name in STRATEGIES:
        return STRATEGIES[name]
    if ":" not in name:
        raise UsageError(f"unknown strategy '{name}'", where="strategy", hint=did_you_mean(name, STRATEGIES))
    module, _, attribute = name.partition(":")
    try:
        cls: type[Any] = getattr(importlib.import_module(module), attribute)
        if not isinstance(cls, type) or not is_dataclass(cls) or not hasattr(cls, "traits") or not hasattr(cls, "step"):
            raise ValueError("it is not a dataclass with traits and step")
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"strategy '{name}' failed to load: {error}", where="strategy", hint="write it as importable.module:Class"
        ) from error
    return cls


def describe(name: str) -> dict[str, Any]:
    """Return what `roundelay list strategies` shows of one strategy, ready for JSON."""
    cls = find(name)
    traits = build(name).traits
    settings = {f.name: f.default for f in fields(cls) if f.init and f.default is not MISSING}
    return {
        "equation": cls.equation,
        "reference": cls.reference,
        "use": cls.advice,
        "weakness": cls.weakness,
        "settings": settings,
        "traits": {f.name: getattr(traits, f.name) for f in fields(traits)},
    }
