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
import os
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from roundelay import config, strategies, topology
from roundelay.api import fit, session
from roundelay.cli import main
from roundelay.core import contracts
from roundelay.launch.context import BACKENDS
from roundelay.metrics import events
from roundelay.recipes import config as recipe
from roundelay.speech.nnet.lstm import PRESETS
from roundelay.strategies import base
from roundelay.testing import conformance

FOLDER = Path(__file__).parents[1] / "reference"
MADE = "<!-- Made from the code by docs/_make/reference.py; change it there, then: make docs -->\n\n"
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


def shown(value: Any) -> str:
    """Return a default as TOML would have it."""
    if value in ("", (), {}, None) or (isinstance(value, str) and value == "required"):
        return str(value) if value == "required" else ""
    return code(str(value).lower() if isinstance(value, bool) else list(value) if isinstance(value, tuple) else value)


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


def limits(name: str) -> str:
    if name in config.CHOICES:
        return "one of " + ", ".join(code(c) for c in config.CHOICES[name])
    return f"at least {config.MINIMUM[name]:g}" if name in config.MINIMUM else ""


def settings_page() -> str:
    meanings = remarks(config.TrainConfig)
    kinds = {f.name: str(f.type) for f in fields(config.TrainConfig)}
    rows = [
        [
            code(f.name),
            re.sub(r"\[.*\]", "", kinds[f.name]).replace("dict", "table"),
            shown(default_of(f)),
            limits(f.name),
            meanings[f.name],
        ]
        for f in sorted(fields(config.TrainConfig), key=lambda f: list(meanings).index(f.name))
    ]
    return f"""# Settings

Everything that `roundelay train FILE key=value` takes, in a TOML file or on the command line. Defaults come first, then the file, then the
command line; later wins, an unknown key is an error. [run.md](../run.md#settings) says when to change what.

{table(["key", "kind", "default", "limits", "meaning"], rows)}

`task_options.NAME=value` and `strategy_options.NAME=value` set fields of the task's and the strategy's class. `roundelay config FILE`
prints every value with where it came from.
"""


# ------------------------------------------------------------------------------------------------------ command line


def option_rows(parser: argparse.ArgumentParser) -> list[list[str]]:
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction | argparse._VersionAction):
            continue
        name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        takes = "" if action.nargs == 0 or not action.option_strings else " " + str(action.metavar or action.dest.upper())
        choices = "one of " + ", ".join(map(str, action.choices)) if action.choices else ""
        default = "the number of cores" if action.dest == "jobs" else action.default
        help = re.sub(r"\s*\(default \d+\)", "", action.help or "")
        documented = not action.option_strings or default in (None, False, "", 0, 0.0) or "default" in help
        note = "" if documented else f"default: {default}"
        rows.append([code(name + takes), "; ".join(t for t in (help, choices, note) if t)])
    return rows


def examples_of(text: str) -> list[str]:
    """Return the commands of an epilog: one per line, or separated by semicolons after 'examples:'."""
    body = re.sub(r"^\s*examples?:", "", text.strip())
    return [part.strip() for line in body.splitlines() for part in line.split(";  ") if part.strip()]


def console(commands: list[str]) -> str:
    return "```console\n" + "\n".join(f"$ {c}" for c in commands) + "\n```"


class _Caught(Exception):
    """Raised to leave a benchmark's main with its parser."""


def bench_parser(main: Callable[[list[str]], Any]) -> argparse.ArgumentParser:
    """Return the parser that a benchmark creates in its main."""
    caught: list[argparse.ArgumentParser] = []
    original = argparse.ArgumentParser.parse_known_args

    def catch(self: argparse.ArgumentParser, *_: Any, **__: Any) -> Any:
        caught.append(self)
        raise _Caught

    argparse.ArgumentParser.parse_known_args = catch  # type: ignore[method-assign, assignment]
    try:
        with contextlib.suppress(_Caught), contextlib.redirect_stdout(io.StringIO()):
            main([])
    finally:
        argparse.ArgumentParser.parse_known_args = original  # type: ignore[method-assign]
    return caught[0]


def commands() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    top = main.parser()
    chosen = next(a for a in top._actions if isinstance(a, argparse._SubParsersAction))
    for name, parser in chosen.choices.items():
        yield f"roundelay {name}", parser
        if name == "bench":
            for which, module in main.BENCHES.items():
                yield f"roundelay bench {which}", bench_parser(importlib.import_module(module).main)


def command_line_page() -> str:
    parts = []
    for name, parser in commands():
        rows = option_rows(parser)
        parts.append(f"## {name}\n\n{(parser.description or '').strip()}\n")
        if rows:
            parts.append(table(["", "meaning"], rows) + "\n")
        if parser.epilog:
            parts.append(console(examples_of(parser.epilog)) + "\n")
    text = "\n".join(parts)
    return f"""# Command line

`roundelay COMMAND --help` prints the same. `--json` prints one JSON object on standard output; everything for people goes to standard error.
Exit codes: 0 done, 1 a bug, 2 usage, 3 data, 4 a peer was lost, 130 interrupted.

{text}"""


# ------------------------------------------------------------------------------------------------------------ tables


def tables_page() -> str:
    described = {name: strategies.describe(name) for name in strategies.STRATEGIES}
    equations = [
        [f"[{n}](../strategies/{n}.md)", code(d["equation"]), d["use"], d["weakness"], d["reference"]]
        for n, d in described.items()
    ]
    options = [
        [code(n), code(k), shown(v)] for n, d in described.items() for k, v in d["settings"].items() if not isinstance(v, type)
    ]
    promises = [f.name for f in fields(base.Traits)]
    meanings = remarks(base.Traits)
    held = [
        [code(n), *(str(d["traits"][p]).lower().replace("true", "yes").replace("false", "no") for p in promises)]
        for n, d in described.items()
    ]
    mixing = [[code(n), *(f"{topology.gap(n, size):.3f}" for size in SIZES)] for n in topology.TOPOLOGIES]
    return f"""# Strategies, topologies, backends

## Strategies

{table(["name", "equation", "use", "weakness", "reference"], equations)}

### Their settings

Given as `strategy_options.NAME=value`; `topology` is a setting of the engine and handed on.

{table(["strategy", "setting", "default"], options)}

### Traits: what each promises

{table(["trait", "meaning"], [[code(p), meanings[p]] for p in promises])}

{table(["strategy", *promises], held)}

`hierarchical` has the traits of the strategy between its machines.

## Topologies

{table(["name", "pairs", "contraction c of the squared spread"], [[code(t.name), t.description, code(t.equation)] for t in topology.TOPOLOGIES.values()])}

The gap 1 - sqrt(c) per round, by number of learners (1: agreement within a sweep). [topologies.md](../topologies.md) explains it.

{table(["name", *map(str, SIZES)], mixing)}

## Backends

{table(["name", "who carries the vectors"], [[code(n), text] for n, text in BACKENDS.items()])}

## Acoustic models

{table(["preset", "parameters", "for"], [[code(n), f"{shape.parameters:,}", use] for n, (shape, use) in PRESETS.items()])}
"""


# ------------------------------------------------------------------------------------------------------------ events


def events_page() -> str:
    parts = [
        f"## {kind}\n\n{table(['field', 'meaning'], [[code(k), text] for k, text in names.items()])}\n"
        for kind, names in events.FIELDS.items()
    ]
    text = "\n".join(parts)
    return f"""# Events

A run writes `events.jsonl`: one JSON object per line, appended by every learner. Every event has
{", ".join(f"`{k}` ({text})" for k, text in events.ALWAYS.items())}. [run.md](../run.md#diagnosing) says what to look at when something is slow or
does not learn.

{text}"""


# ----------------------------------------------------------------------------------------------------------- recipes


def below(cls: type[Any]) -> dict[str, str]:
    """Return the remarks on fields, including those in the docstring as `name   meaning`."""
    texts = remarks(cls)
    names = {f.name for f in fields(cls)}
    last: list[str] = []
    for line in (cls.__doc__ or "").splitlines():
        head = re.match(r"\s*([a-z_]+(?:, [a-z_]+)*)\s{2,}(\S.*)", line)
        if head and set(head[1].split(", ")) <= names:
            last = head[1].split(", ")
            for name in last:
                texts[name] = head[2]
        elif last and line.strip() and line.startswith("     "):
            for name in last:
                texts[name] += " " + line.strip()
        else:
            last = []
    return texts


def recipes_page() -> str:
    def rows(cls: type[Any]) -> list[list[str]]:
        meanings = below(cls)
        return [[code(f.name), shown(default_of(f)), meanings.get(f.name, "")] for f in fields(cls) if f.name not in skipped]

    skipped = {"folder", "sources", "kaldi", *recipe.SECTIONS}
    parts = [f"## The recipe itself\n\n{table(['key', 'default', 'meaning'], rows(recipe.Recipe))}\n"]
    skipped = set()
    parts.append(f"## [[source]]\n\n{table(['key', 'default', 'meaning'], rows(recipe.SourceConfig))}\n")
    for name, cls in recipe.SECTIONS.items():
        parts.append(f"## [{name}]\n\n{table(['key', 'default', 'meaning'], rows(cls))}\n")
    text = "\n".join(parts)
    return f"""# Recipes

What a `recipe.toml` may say; `section.key=value` on the command line overrides it. `[train]` takes the [settings](settings.md) of the engine
except {", ".join(code(k) for k in recipe.TOLD_BY_THE_RECIPE)}. [speech.md](../speech.md) says what the stages do.

{text}"""


# ------------------------------------------------------------------------------------------------------------ Python


def callable_part(name: str, thing: Any, level: str = "##") -> str:
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(thing)))
    signature = re.sub(r"\b(?:[a-z_]+\.)+([A-Z]\w*)", r"\1", signature).replace("(self, ", "(")
    return f"{level} {name}\n\n```text\n{name}{signature}\n```\n\n{inspect.cleandoc(thing.__doc__ or '')}\n"


def python_page() -> str:
    parts = [callable_part("roundelay.Session", session.Session)]
    for name in ("loader", "step", "join_uneven"):
        parts.append(callable_part(f"session.{name}", getattr(session.Session, name), "###"))
    parts.append(
        "`session.rank` and `session.size` are the rank and the number of ranks; `session.steps` counts the steps of this rank.\n"
    )
    parts.append(callable_part("roundelay.fit", fit.fit))
    parts.append("## Task\n\n" + inspect.cleandoc(contracts.__doc__ or "") + "\n")
    rows = [
        [code(n), " ".join((inspect.getdoc(getattr(contracts.Task, n)) or "").split())]
        for n in ("samples", "build", "batch", "loss", "evaluate")
    ]
    parts.append(table(["", "meaning"], rows) + "\n")
    parts.append(callable_part("roundelay.metrics.events.read_events", events.read_events))
    parts.append(callable_part("roundelay.testing.conformance.check_strategy", conformance.check_strategy))
    text = "\n".join(parts)
    return f"""# Python

[own-loop.md](../howto/own-loop.md) shows these at work, [own-strategy.md](../howto/own-strategy.md) how a strategy is written.

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
    return MADE + PAGES[name]().rstrip() + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in PAGES:
        (FOLDER / f"{name}.md").write_text(render(name), encoding="utf-8")
