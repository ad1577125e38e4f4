"""Load settings from a TOML file and `key=value` items into any dataclass.

Later sources win: defaults, then the file, then the command line. Nested dataclasses are sections, tuples of dataclasses are
lists of sections. Unknown keys, wrong types and values out of range raise a UsageError that names the section and the origin.
"""

from __future__ import annotations

import re
import tomllib
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, overload

from roundelay.core.settings import constraint_of, key_of, satisfies
from roundelay.engine.config import TrainConfig
from roundelay.errors import UsageError, did_you_mean

COMMAND_LINE = "command line"
TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
T = TypeVar("T")


@dataclass(frozen=True)
class ResolvedConfig(Generic[T]):
    """Settings and the origin of each key: "file.toml:3", "command line", or absent for a default."""

    settings: T
    origins: Mapping[str, str]
    folder: Path
    """Folder of the file: relative names in it refer to this folder."""

    def origin(self, key: str) -> str:
        """Return where a dotted key was set."""
        return origin_of(self.origins, key, headers=False) or "default"


@overload
def load(path: str | Path | None, overrides: Sequence[str] = ()) -> ResolvedConfig[TrainConfig]: ...


@overload
def load(path: str | Path | None, overrides: Sequence[str], schema: type[T]) -> ResolvedConfig[T]: ...


def load(path: str | Path | None, overrides: Sequence[str] = (), schema: type[Any] = TrainConfig) -> ResolvedConfig[Any]:
    """Return the settings of a file (or of none) with `key=value` items on top.

    Raises:
        UsageError: The file cannot be read, or a key or value is invalid.
    """
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    folder = Path.cwd()
    if path is not None:
        folder = Path(path).resolve().parent
        tree, origins = read_toml(Path(path))
    apply(tree, origins, overrides, schema)
    settings = build(schema, tree, str(path) if path is not None else COMMAND_LINE, origins)
    return ResolvedConfig(settings, origins, folder)


def read_toml(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tree of a TOML file, and for each dotted key the file and line that sets it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read {path}: {cause}", where=str(path), hint="give the path of a TOML file") from error
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} is not valid TOML: {error}", where=str(path), hint='put text in quotes: key = "text"'
        ) from error
    return tree, {key: f"{path}:{line}" for key, line in _lines(text).items()}


def _lines(text: str) -> dict[str, int]:
    """Return the line of each key. Keys in the second section of a list are named `section[1].key`."""
    lines: dict[str, int] = {}
    counts: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*(\[\[?)\s*([\w.-]+)\s*\]", line):
            section = header.group(2)
            if header.group(1) == "[[":
                index = counts[section] = counts.get(section, -1) + 1
                section = f"{section}[{index}]" if index else section
            else:  # a sub-section of a list belongs to the list's latest element
                parent, dot, rest = section.partition(".")
                section = f"{parent}[{counts[parent]}]{dot}{rest}" if counts.get(parent, 0) else section
            lines.setdefault(f"[{section}]", number)
        elif key := re.match(r"\s*([\w.-]+)\s*=", line):
            lines.setdefault(f"{section}.{key.group(1)}" if section else key.group(1), number)
    return lines


def origin_of(origins: Mapping[str, str], key: str, headers: bool = True) -> str:
    """Return where a dotted key, or else an inline section that contains it, was set; or else the header of its section."""
    while key:
        if key in origins:
            return origins[key]
        if headers and f"[{key}]" in origins:
            return origins[f"[{key}]"]
        key = key.rpartition(".")[0]
    return ""


# -- key=value ---------------------------------------------------------------------------------------------------------


def parse_item(item: str) -> tuple[str, Any]:
    """Split `key=value`. The value is read as TOML; text that is not valid TOML stays text."""
    key, equals, text = item.partition("=")
    if not equals or not key.strip():
        raise UsageError(
            f"'{item}' is not of the form key=value", where=COMMAND_LINE, hint="write for example strategy=kstep lr=0.1"
        )
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except (ValueError, RecursionError):
        value = text
    return key.strip(), value


def split_items(items: Iterable[str], schema: type[Any]) -> tuple[list[str], list[str]]:
    """Divide `key=value` items into those whose first name is a key of the schema, and the rest."""
    names = set(_keys(schema))
    own: list[str] = []
    rest: list[str] = []
    for item in items:
        (own if re.split(r"[.\[]", parse_item(item)[0])[0] in names else rest).append(item)
    return own, rest


def apply(tree: dict[str, Any], origins: dict[str, str], items: Iterable[str], schema: type[Any]) -> None:
    """Set `section.key=value` items in a tree. `source.root=x` sets a key of the first element of a list of sections."""
    for item in items:
        key, value = parse_item(item)
        *sections, last = key.split(".")
        node: dict[str, Any] = tree
        kind: Any = schema
        for depth, name in enumerate(sections):
            base, index = _index(name)
            element = _element(_type_of(kind, base))
            if element is not None:
                rows = node.setdefault(base, [{}])
                if not isinstance(rows, list) or index >= len(rows):
                    raise UsageError(f"[[{base}]] has no element {index}", where=item, hint=f"use {base}[0] to {base}[N-1]")
                child, kind = rows[index], element
            else:
                child, kind = node.setdefault(base, {}), _type_of(kind, base)
            if not isinstance(child, dict):
                path = ".".join(sections[: depth + 1])
                raise UsageError(f"'{path}' is not a section", where=item, hint=f"set it as a whole: {path}=…")
            node = child
        if isinstance(value, dict) and isinstance(node.get(last), dict):
            value = {**node[last], **value}
        node[last] = value
        origins[key.replace("[0]", "")] = COMMAND_LINE


def _index(name: str) -> tuple[str, int]:
    match = re.fullmatch(r"(.+)\[(\d+)\]", name)
    return (match.group(1), int(match.group(2))) if match else (name, 0)


# -- building ----------------------------------------------------------------------------------------------------------


def build(
    schema: type[T], tree: Any, where: str = COMMAND_LINE, origins: Mapping[str, str] | None = None, section: str = ""
) -> T:
    """Return a dataclass from plain values. `where` is the location in errors for keys that `origins` does not list."""
    values = _values(schema, tree, where, origins or {}, section)
    missing = [
        key
        for key, f in _keys(schema).items()
        if f.name not in values and f.default is MISSING and f.default_factory is MISSING
    ]
    if missing:
        raise UsageError(
            f"missing key '{missing[0]}'{_inside(section)}", where=where, hint=f"add {missing[0]} = …{_inside(section)}"
        )
    try:
        return schema(**values)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{_label(section) or 'settings'}: {error}", where=where, hint="change one of these settings"
        ) from error


def check_partial(schema: type[Any], tree: Any, where: str, section: str = "") -> dict[str, Any]:
    """Return the checked values of some keys of a schema, without filling in defaults."""
    return _values(schema, tree, where, {}, section)


def _values(schema: type[Any], tree: Any, where: str, origins: Mapping[str, str], section: str) -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        raise UsageError(
            f"{_label(section)} must be a section (got {tree!r})", where=origin_of(origins, section) or where,
            hint=f"write [{section}] and its keys below it",
        )  # fmt: skip
    declarations = _keys(schema)
    values: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{section}.{key}" if section else key
        location = origin_of(origins, path) or where
        if key not in declarations:
            raise UsageError(f"unknown key '{key}'{_inside(section)}", where=location, hint=did_you_mean(key, declarations))
        declaration = declarations[key]
        values[declaration.name] = _Converter(declaration, path, where, origins).convert(_type_of(schema, key), value)
    return values


@dataclass(frozen=True)
class _Converter:
    """Convert the plain value of one setting to its type and check its constraint."""

    declaration: Field[Any]
    path: str
    where: str
    origins: Mapping[str, str]

    def convert(self, kind: Any, value: Any) -> Any:
        element = _element(kind)
        inner = self.declaration.metadata.get("schema")
        if _section_type(kind) is not None:
            return build(_section_type(kind), value, self.where, self.origins, self.path)  # type: ignore[arg-type]
        if element is not None:
            if not isinstance(value, list | tuple):
                self.refuse("must be a list of sections", value, f"write [[{self.path}]] and its keys below it")
            names = [self.path + (f"[{n}]" if n else "") for n in range(len(value))]
            return tuple(build(element, row, self.where, self.origins, name) for name, row in zip(names, value, strict=True))
        if inner is not None:
            values = _values(inner, value, self.where, self.origins, self.path)
            for key in self.declaration.metadata["reserved"]:
                if key in values:
                    raise UsageError(
                        f"'{key}' must not be set{_inside(self.path)}: it is derived",
                        where=origin_of(self.origins, f"{self.path}.{key}") or self.where,
                        hint="remove it",
                    )
            return values
        return self._checked(self._typed(kind, value))

    @property
    def location(self) -> str:
        return origin_of(self.origins, self.path) or self.where

    def refuse(self, rule: str, value: Any, hint: str = "") -> None:
        shown = f"'{value}'" if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
        if isinstance(value, float):
            shown = f"{value:g}"
        raise UsageError(f"{_label(self.path)} {rule} (got {shown})", where=self.location, hint=hint or self._example())

    def _example(self) -> str:
        from roundelay.config.writer import toml_value

        default = self.declaration.default
        example = None if default is MISSING or default is None else toml_value(default)
        return f"for example {self.path}={example}" if example not in (None, '""') else "correct the value"

    def _typed(self, kind: Any, value: Any) -> Any:
        options = [option for option in _options(kind) if option is not type(None)]
        for lenient in (False, True):
            for option in options:
                fits, converted = _convert_scalar(option, value, lenient)
                if fits:
                    return converted
        self.refuse(f"must be {' or '.join(_type_name(option) for option in options)}", value)
        raise AssertionError("unreachable")

    def _checked(self, value: Any) -> Any:
        if not satisfies(self.declaration, value):
            rule = constraint_of(self.declaration)
            choices = self.declaration.metadata.get("choices")
            hint = did_you_mean(str(value), choices) if choices else f"give a number {rule}"
            self.refuse(f"must be {rule}", value, hint)
        return value


def _convert_scalar(kind: Any, value: Any, lenient: bool) -> tuple[bool, Any]:
    """Return whether a plain value fits a type, and the converted value."""
    origin = get_origin(kind)
    if kind is Any:
        return True, value
    if origin is Literal:
        return value in get_args(kind), value
    if kind is dict or origin in (dict, Mapping):
        return isinstance(value, Mapping), dict(value) if isinstance(value, Mapping) else value
    if origin in (tuple, list, Sequence) or kind in (tuple, list):
        return _convert_list(kind, value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 1 << 1000, float(value) if abs(value) < 1 << 1000 else value
    if kind is int and lenient and isinstance(value, float) and value.is_integer():
        return True, int(value)
    if kind in (str, Path) and lenient and not isinstance(value, dict | list):
        return True, kind(str(value).lower() if isinstance(value, bool) else str(value))
    if kind in TYPE_NAMES or kind is Path:
        return type(value) is kind, value
    return True, value


def _convert_list(kind: Any, value: Any) -> tuple[bool, Any]:
    if not isinstance(value, list | tuple):
        return False, value
    arguments = get_args(kind)
    fixed = get_origin(kind) is tuple and arguments and arguments[-1] is not Ellipsis
    if fixed and len(value) != len(arguments):
        return False, value
    element_types = arguments if fixed else [arguments[0] if arguments else Any] * len(value)
    items = []
    for element, item in zip(element_types, value, strict=True):
        pairs = [_convert_scalar(option, item, lenient) for lenient in (False, True) for option in _options(element)]
        chosen = next((converted for fits, converted in pairs if fits), MISSING)
        if chosen is MISSING:
            return False, value
        items.append(chosen)
    return True, list(items) if get_origin(kind) is list else tuple(items)


# -- types -------------------------------------------------------------------------------------------------------------


_HINTS: dict[Any, dict[str, Any]] = {}


def _hints(schema: Any) -> dict[str, Any]:
    if schema not in _HINTS:  # resolving annotations is slow
        _HINTS[schema] = get_type_hints(schema)
    return _HINTS[schema]


def _keys(schema: Any) -> dict[str, Field[Any]]:
    return {key_of(f): f for f in fields(schema) if f.init}


def _type_of(schema: Any, key: str) -> Any:
    """Return the type of a key, or None outside of schemas."""
    if _section_type(schema) is None:
        return None
    cls = _section_type(schema)
    declaration = _keys(cls).get(key)
    if declaration is None:
        return None
    return _hints(cls)[declaration.name]


def _options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _section_type(kind: Any) -> type[Any] | None:
    """Return the dataclass of a section, also of an optional one."""
    return next((option for option in _options(kind) if isinstance(option, type) and is_dataclass(option)), None)


def _element(kind: Any) -> type[Any] | None:
    """Return the dataclass of a list of sections."""
    if get_origin(kind) not in (tuple, list):
        return None
    return _section_type(get_args(kind)[0]) if get_args(kind) else None


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of: " + ", ".join(map(str, get_args(kind)))
    if get_origin(kind) in (tuple, list, Sequence):
        arguments = get_args(kind)
        fixed = get_origin(kind) is tuple and arguments[-1] is not Ellipsis
        return f"a list of {len(arguments)} values" if fixed else "a list"
    return TYPE_NAMES.get(kind, "a section" if get_origin(kind) is dict else getattr(kind, "__name__", str(kind)))


def _inside(section: str) -> str:
    return f" in [{section}]" if section else ""


def _label(path: str) -> str:
    """Return `key` at the top level and `[section] key` below it."""
    section, _, key = path.rpartition(".")
    return f"[{section}] {key}" if section else key
