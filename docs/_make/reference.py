"""Write the reference pages from the code. `make docs` runs this; a test compares the output with the pages in the tree.

python docs/_make/reference.py          write docs/reference/*.md
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import inspect
import io
import json
import os
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from roundelay import config, strategies, topology
from roundelay.api import fit, session
from roundelay.cli import bench, main
from roundelay.core import contracts
from roundelay.core.settings import constraint_of, help_of, key_of
from roundelay.launch.context import BACKENDS
from roundelay.metrics import events
from roundelay.recipes import config as recipe
from roundelay.speech.nnet.lstm import PRESETS
from roundelay.strategies import base
from roundelay.testing import conformance

FOLDER = Path(__file__).parents[1] / "reference"
HEADER = "<!-- Generated from the code by docs/_make/reference.py; change it there, then: make docs -->\n\n"
SIZES = (2, 3, 4, 5, 6, 8, 16)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(escaped, row)) + " |" for row in rows])


def escaped(cell: str) -> str:
    """Escape column separators and tags, except inside `code`."""
    parts = cell.replace("|", "\\|").split("`")
    return "`".join(part.replace("<", "&lt;") if n % 2 == 0 else part for n, part in enumerate(parts))


def code(value: Any) -> str:
    return f"`{value}`" if str(value) else ""


def default_of(field: Any) -> Any:
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else "required"


def toml_value(value: Any) -> str:
    """Return a default in TOML notation; "required" and "empty" are words."""
    if isinstance(value, str) and value == "required":
        return value
    if value is None:
        return "unset"
    if value in ("", (), [], {}):
        return "empty"
    return code(json.dumps(value, ensure_ascii=False))


def sentence(text: str) -> str:
    """Return a text that begins with a capital letter and ends with a full stop, so that its cell can be read alone."""
    text = " ".join(text.split())
    if not text:
        return ""
    first = text.split()[0]
    starts_with_name = first.strip(",:;") in NAMES or first.endswith(",") or text[0] in "`$["
    text = text if starts_with_name else text[0].upper() + text[1:]
    return text if text[-1] in ".!?" else text + "."


NAMES = frozenset({"lr", "no", "espeak", "corpus", "synth", "scp", "static", "dynamic", "torch", "roundelay"})
"""Lower-case words that stay so at the beginning of a sentence: they are names."""


# ---------------------------------------------------------------------------------------------------------- settings


def remarks(cls: type[Any]) -> dict[str, str]:
    """Return the remark on every field of a class: a comment on the same line, or a string below it."""
    source = textwrap.dedent(inspect.getsource(cls))
    lines = source.splitlines()
    body = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)).body
    texts = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            comment = re.search(r"  # (.*)$", lines[node.end_lineno - 1] if node.end_lineno else "")
            text = comment[1] if comment else ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = " ".join(str(after.value.value).split())
            texts[node.target.id] = text
    return texts


def meanings_of(cls: type[Any]) -> dict[str, str]:
    """Return the help text of every field of a class; without one, the remark in the source."""
    texts = remarks(cls) if any(not help_of(f) for f in fields(cls)) else {}
    return {f.name: sentence(help_of(f) or texts.get(f.name, "")) for f in fields(cls)}


def constraint(declaration: Field[Any]) -> str:
    """Return the constraint of a setting for a cell: choices as code."""
    if choices := declaration.metadata.get("choices"):
        return "one of " + ", ".join(map(code, choices))
    return constraint_of(declaration)


def type_of(declaration: Field[Any]) -> str:
    """Return the type of a setting in words of TOML."""
    names = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "Path": "string"}
    parts = []
    for part in str(declaration.type).split(" | "):
        name = part.partition("[")[0]
        if name in ("tuple", "list", "Sequence"):
            parts.append("array")
        elif name == "dict":
            parts.append("table")
        elif name == "Literal":
            parts.append("string")
        elif name != "None":
            parts.append(names.get(name, "string" if isinstance(declaration.default, str) else "table"))
    return " or ".join(dict.fromkeys(parts))


def setting_rows(cls: type[Any], skipped: frozenset[str] = frozenset()) -> list[list[str]]:
    """Return a row per setting: key, type, default, constraint, meaning."""
    meanings = meanings_of(cls)
    return [
        [code(key_of(f)), type_of(f), toml_value(default_of(f)), constraint(f), meanings[f.name]]
        for f in fields(cls)
        if f.name not in skipped and not f.metadata.get("hidden")
    ]


SETTING_HEAD = ["key", "type", "default", "constraint", "meaning"]


def settings_page() -> str:
    engine = {f.name for f in fields(config.EngineConfig)}
    own = setting_rows(config.TrainConfig, frozenset(engine))
    return f"""# Settings

All settings of `roundelay train FILE key=value`, in a TOML file or on the command line. Values of the command line replace those of the file,
which replace the defaults. An unknown key is an error. [Run](../run.md#settings) explains when to change them.

## Engine

These settings are also keyword arguments of `roundelay.Session`.

{table(SETTING_HEAD, setting_rows(config.EngineConfig))}

## Training loop and run directory

{table(SETTING_HEAD, own)}

`task_options.NAME=value` and `strategy_options.NAME=value` set fields of the class of the task and of the strategy. `roundelay config FILE`
prints every value with its origin.
"""


# ------------------------------------------------------------------------------------------------------ command line


def option_rows(parser: argparse.ArgumentParser) -> list[list[str]]:
    rows = []
    for action in parser._actions:
        hidden = action.help == argparse.SUPPRESS
        if hidden or isinstance(action, argparse._HelpAction | argparse._SubParsersAction | argparse._VersionAction):
            continue
        name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        value = "" if action.nargs == 0 or not action.option_strings else " " + str(action.metavar or action.dest.upper())
        text = sentence(re.sub(r"\s*\(default (?:%\(default\)s|[^)]*)\)", "", action.help or ""))
        choices = f"One of {', '.join(map(code, action.choices))}." if action.choices else ""
        if choices and text.rstrip(".") == ", ".join(map(str, action.choices)):
            text = choices
        elif choices and not all(str(c) in text for c in action.choices):
            text = f"{text} {choices}".strip()
        default = "number of cores" if action.dest == "jobs" else action.default
        if not action.option_strings or default in (None, False, "", 0, 0.0) or "default" in text.lower():
            default = ""
        rows.append([code(name + value), code(default) if action.dest != "jobs" else str(default), text])
    return rows


def examples_of(text: str) -> list[str]:
    """Return the commands of an epilog: those on the line of 'examples:', and the indented lines after it."""
    first, *rest = text.strip().splitlines()
    lines = [first.partition("examples:")[2], *(line for line in rest if line.startswith("  "))]
    return [part.strip() for line in lines for part in line.split(";  ") if part.strip() and "…" not in part]


def console(commands: list[str]) -> str:
    return "```console\n" + "\n".join(f"$ {c}" for c in commands) + "\n```"


class _ParserCreated(Exception):
    """Raised to leave a function with the parser that it has created."""


def parser_of(function: Callable[[list[str]], Any]) -> argparse.ArgumentParser:
    """Return the parser that a `main(argv)` creates."""
    parsers: list[argparse.ArgumentParser] = []
    original = argparse.ArgumentParser.parse_known_args

    def leave(self: argparse.ArgumentParser, *_: Any, **__: Any) -> Any:
        parsers.append(self)
        raise _ParserCreated

    argparse.ArgumentParser.parse_known_args = leave  # type: ignore[method-assign, assignment]
    try:
        with contextlib.suppress(_ParserCreated), contextlib.redirect_stdout(io.StringIO()):
            function([])
    finally:
        argparse.ArgumentParser.parse_known_args = original  # type: ignore[method-assign]
    return parsers[0]


def commands() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield every command with its parser."""
    for name in main.COMMANDS:
        if name in main.FORWARDED:
            yield f"roundelay {name}", parser_of(importlib.import_module(main.FORWARDED[name]).main)
        else:
            yield f"roundelay {name}", main.command_parser(name)[0]
        if name == "bench":
            for which, module in bench.BENCHES.items():
                yield f"roundelay bench {which}", parser_of(importlib.import_module(module).main)


def command_line_page() -> str:
    parts = []
    for name, parser in commands():
        rows = option_rows(parser)
        parts.append(f"## {name}\n\n{sentence((parser.description or '').strip().partition(chr(10) * 2)[0])}\n")
        if rows:
            parts.append(table(["argument", "default", "meaning"], rows) + "\n")
        if parser.epilog and examples_of(parser.epilog):
            parts.append(console(examples_of(parser.epilog)) + "\n")
    text = "\n".join(parts)
    return f"""# Command line

`roundelay COMMAND --help` prints the same. With `--json` a command prints one JSON object on standard output. Messages go to standard error.

| exit code | meaning |
|---|---|
| 0 | The command succeeded. |
| 1 | An internal error: please report it. |
| 2 | The command line or a setting is wrong. |
| 3 | The data are wrong or missing. |
| 4 | Another rank failed, and the strategy cannot continue without it. |
| 130 | The command was interrupted. |

{text}"""


# ------------------------------------------------------------------------------------------------------------ tables


def tables_page() -> str:
    rows = {name: strategies.describe(name) for name in strategies.STRATEGIES}
    equations = [
        [f"[{n}](../strategies/{n}.md)", code(d["equation"]), d["use"], d["weakness"], d["reference"]] for n, d in rows.items()
    ]
    options = [
        [f"[{n}](../strategies/{n}.md#settings)", code(k), toml_value(v)]
        for n, d in rows.items()
        for k, v in d["settings"].items()
        if not isinstance(v, type)
    ]
    traits = [f.name for f in fields(base.Traits)]
    meanings = remarks(base.Traits)
    values = [
        [code(n), *(str(d["traits"][t]).lower().replace("true", "yes").replace("false", "no") for t in traits)]
        for n, d in rows.items()
    ]
    mixing = [[code(n), *(f"{topology.gap(n, size):.3f}" for size in SIZES)] for n in topology.TOPOLOGIES]
    shapes = [[code(t.name), sentence(t.description), code(t.equation)] for t in topology.TOPOLOGIES.values()]
    return f"""# Strategies, topologies, backends

## Strategies

{table(["name", "equation", "use", "weakness", "reference"], equations)}

### Settings of strategies

Set them with `strategy_options.NAME=value`. The page of each strategy explains when to change them. `topology` is a setting of the engine and is
passed on to the strategy.

{table(["strategy", "setting", "default"], options)}

### Traits of strategies

{table(["trait", "meaning"], [[code(t), sentence(meanings[t])] for t in traits])}

{table(["strategy", *map(code, traits)], values)}

`hierarchical` has the traits of the strategy between its nodes.

## Topologies

{table(["name", "pairs", "contraction c of the squared spread"], shapes)}

The next table is the gap 1 - sqrt(c) per round, by number of learners. A gap of 1 means that all learners agree within one sweep.
[Topologies](../topologies.md) explains it.

{table(["name", *(f"{size} learners" for size in SIZES)], mixing)}

## Backends

{table(["name", "communication"], [[code(n), sentence(text)] for n, text in BACKENDS.items()])}

## Acoustic models

{table(["preset", "parameters", "use"], [[code(n), f"{shape.parameters:,}", sentence(use)] for n, (shape, use) in PRESETS.items()])}
"""


# ------------------------------------------------------------------------------------------------------------ events


def events_page() -> str:
    parts = [
        f"## {kind}\n\n{table(['field', 'meaning'], [[code(k), sentence(text)] for k, text in names.items()])}\n"
        for kind, names in events.FIELDS.items()
    ]
    text = "\n".join(parts)
    always = table(["field", "meaning"], [[code(k), sentence(text)] for k, text in events.ALWAYS.items()])
    return f"""# Events

A run writes `events.jsonl`: one JSON object per line, appended by all ranks. [Run](../run.md#diagnose) explains which events to look at when a run is
slow or does not learn.

## All events

{always}

{text}"""


# ----------------------------------------------------------------------------------------------------------- recipes


def sections() -> dict[str, type[Any]]:
    """Return the sections of a recipe with their classes."""
    tree = {f.name: default_of(f) for f in fields(recipe.Recipe)}
    return {name: type(value) for name, value in tree.items() if hasattr(value, "__dataclass_fields__")}


def recipes_page() -> str:
    skipped = frozenset({"sources", "kaldi", "train", *sections()})
    parts = [f"## Top level\n\n{table(SETTING_HEAD, setting_rows(recipe.Recipe, skipped))}\n"]
    parts.append(f"## [[source]]\n\n{table(SETTING_HEAD, setting_rows(recipe.SourceConfig))}\n")
    for name, cls in {**sections(), "kaldi": recipe.KaldiInputs}.items():
        parts.append(f"## [{name}]\n\n{table(SETTING_HEAD, setting_rows(cls))}\n")
    text = "\n".join(parts)
    return f"""# Recipes

The keys of a `recipe.toml`; `section.key=value` on the command line overrides them. `[train]` takes the [settings](settings.md) of `roundelay train`
except {", ".join(code(k) for k in recipe.DERIVED_KEYS)}, which the pipeline sets. [The speech pipeline](../speech.md) explains the stages.

{text}"""


# ------------------------------------------------------------------------------------------------------------ Python


def callable_part(name: str, thing: Any, level: str = "##") -> str:
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(thing)))
    signature = re.sub(r"\b(?:[a-z_]+\.)+([A-Z]\w*)", r"\1", signature).replace("(self, ", "(")
    return f"{level} {name}\n\n```text\n{name}{signature}\n```\n\n{markdown_of(inspect.cleandoc(thing.__doc__ or ''))}\n"


def markdown_of(docstring: str) -> str:
    """Return a docstring as Markdown: arguments as a table, code as a block."""
    parts = []
    for part in docstring.split("\n\n"):
        head, _, rest = part.partition("\n")
        if head in ("Args:", "Raises:", "Returns:"):
            items = re.findall(r"^ {4}(\S[^:]*): (.*(?:\n {5,}.*)*)", rest, re.MULTILINE)
            label = {"Args:": "argument", "Raises:": "exception", "Returns:": "value"}[head]
            parts.append(table([label, "meaning"], [[code(n), sentence(text)] for n, text in items]))
        elif head.startswith(("with ", "for ", "    ")):
            parts.append(f"```text\n{textwrap.dedent(part)}\n```")
        else:
            parts.append(part)
    return "\n\n".join(parts)


def python_page() -> str:
    parts = [callable_part("roundelay.Session", session.Session)]
    for name in ("loader", "step", "join_uneven"):
        parts.append(callable_part(f"session.{name}", getattr(session.Session, name), "###"))
    parts.append(
        "`session.rank` and `session.size` are the rank and the number of ranks; `session.steps` counts the steps of this rank.\n"
    )
    parts.append(callable_part("roundelay.fit", fit.fit))
    parts.append("## Task\n\n" + inspect.cleandoc(contracts.Task.__doc__ or "") + "\n")
    rows = [
        [code(n), sentence(inspect.getdoc(getattr(contracts.Task, n)) or "")]
        for n in ("samples", "build", "batch", "loss", "evaluate")
    ]
    parts.append(table(["member", "meaning"], rows) + "\n")
    parts.append(callable_part("roundelay.metrics.events.read_events", events.read_events))
    parts.append(callable_part("roundelay.testing.conformance.check_strategy", conformance.check_strategy))
    text = "\n".join(parts)
    return f"""# Python

[Your own model and loop](../howto/own-loop.md) uses these functions; [Your own strategy](../howto/own-strategy.md) explains how to write a strategy.

{text}"""


PAGES: dict[str, Callable[[], str]] = {
    "settings": settings_page,
    "command-line": command_line_page,
    "tables": tables_page,
    "events": events_page,
    "recipes": recipes_page,
    "python": python_page,
}


def render(name: str) -> str:
    os.environ["COLUMNS"] = "120"
    return HEADER + PAGES[name]().rstrip() + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in PAGES:
        (FOLDER / f"{name}.md").write_text(render(name), encoding="utf-8")
