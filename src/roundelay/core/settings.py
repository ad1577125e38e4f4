"""Declare a setting once: default, help text, range and choices live in the dataclass field."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, field, fields
from typing import Any


def setting(
    default: Any = MISSING,
    *,
    help: str,
    factory: Callable[[], Any] | None = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    infinite: bool = False,
    choices: Sequence[str] = (),
    key: str = "",
    schema: type[Any] | None = None,
    reserved: Sequence[str] = (),
    local: bool = False,
) -> Any:
    """Return a dataclass field that documents and constrains itself.

    Args:
        default: Value if the key is absent. Without `default` and `factory` the key is required.
        help: One sentence for `--help`, the reference and error messages.
        factory: Build the default, for mutable values.
        minimum, above, maximum: Bounds of a number: `value >= minimum`, `value > above`, `value <= maximum`.
        infinite: Allow infinity. NaN is never allowed in a bounded field.
        choices: Allowed texts.
        key: Name in files and on the command line, if it differs from the field's.
        schema: For a dict field: a dataclass that its keys must belong to. Only the keys that are set are kept.
        reserved: Keys of `schema` that must not be set here.
        local: The ranks of a job may have different values.
    """
    metadata = {
        "help": help, "minimum": minimum, "above": above, "maximum": maximum, "infinite": infinite,
        "choices": tuple(choices), "key": key, "schema": schema, "reserved": tuple(reserved),
        "local": local,
    }  # fmt: skip
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def common_settings(settings: Any) -> dict[str, Any]:
    """Return the settings of a dataclass that all ranks of a job must agree on, by key: all that are not declared local."""
    return {key_of(f): getattr(settings, f.name) for f in fields(settings) if not f.metadata.get("local")}


def key_of(declaration: Field[Any]) -> str:
    """Return the name of a setting in files and on the command line."""
    return str(declaration.metadata.get("key") or declaration.name)


def help_of(declaration: Field[Any]) -> str:
    """Return the help text of a setting, or "" if it has none."""
    return str(declaration.metadata.get("help", ""))


def constraint_of(declaration: Field[Any]) -> str:
    """Return the constraint as a phrase such as ">= 0" or "one of: a, b", or "" if there is none."""
    rules = declaration.metadata
    if rules.get("choices"):
        return "one of: " + ", ".join(rules["choices"])
    bounds = ((">=", rules.get("minimum")), (">", rules.get("above")), ("<=", rules.get("maximum")))
    return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)


def satisfies(declaration: Field[Any], value: Any) -> bool:
    """Return whether a value of the right type keeps the constraint of its setting."""
    rules = declaration.metadata
    if rules.get("choices") and isinstance(value, str):
        return value in rules["choices"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    minimum, above, maximum = (rules.get(name) for name in ("minimum", "above", "maximum"))
    if minimum is None and above is None and maximum is None:
        return True
    if math.isnan(value) or (math.isinf(value) and not rules.get("infinite")):
        return False
    return (minimum is None or value >= minimum) and (above is None or value > above) and (maximum is None or value <= maximum)
