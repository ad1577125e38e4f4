"""Checks the language of code and documentation: banned words, British spelling, participles as variable names.

    python tests/support/language.py src/roundelay/comm docs/README.md      # list the violations of some files

The rules are those of CONTRIBUTING.md, "Language". Text in `backticks` and in fenced `text` blocks is exempt in Markdown, and so is
every line with the marker `language: ok`.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PRIVATE_WORDS = (
    r"meetings?", r"dice", r"huddles?", r"porters?", r"errands?", r"signs? of life", r"judges?", r"judged", r"judging", r"roll-calls?",
    r"strangers?", r"knock(?:s|ed)?", r"bur(?:y|ies|ied)", r"goodbye", r"road", r"wires?",
)  # fmt: skip
PERSONS = (
    r"whoever", r"whomever", r"somebody", r"nobody", r"everybody", r"anybody", r"someone", r"everyone", r"anyone", r"the dead",
    r"the living", r"the others",
)  # fmt: skip
TRANSLATED = (
    r"anew", r"afresh", r"so many", r"that many", r"this many", r"so much", r"beside", r"stands", r"is said", r"are said", r"heard",
    r"told", r"without a word", r"goes on", r"go on", r"going on", r"went on", r"of one's own", r"as far as", r"likewise", r"thereby",
    r"needs not", r"hand(?:s|ed)? out", r"at hand",
)  # fmt: skip
BRITISH = (
    r"\w*colour\w*", r"neighbour\w*", r"\w*normalis\w*", r"\w*initialis\w*", r"recognis\w*", r"synthesis(?:e|ed|es|er|ing)\b",
    r"randomis\w*", r"minimis\w*", r"maximis\w*", r"optimis(?:e|ed|es|er|ing)\b", r"behaviour\w*", r"centres?", r"centred", r"learnt", r"favour\w*",
    r"licence", r"organis\w*", r"generalis\w*", r"specialis\w*", r"vectoris\w*", r"serialis\w*", r"parallelis(?:e|ed|es|ing)\b", r"travell\w*", r"catalogue",
    r"grey", r"labelled", r"modelled", r"cancelled", r"determinis(?:e|ed|es|ing)\b",
)  # fmt: skip
BANNED = re.compile(r"\b(?:" + "|".join(PRIVATE_WORDS + PERSONS + TRANSLATED + BRITISH) + r")\b", re.IGNORECASE)
PARTICIPLES = frozenset({"found", "made", "said", "told", "given", "heard", "known", "taken", "brought", "drawn"})
MARKER = "language: ok"


def words_of_python(source: str) -> Iterator[tuple[int, str]]:
    """Yield comments and strings, which includes docstrings and messages, with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


def variables(source: str) -> Iterator[tuple[int, str]]:
    """Yield every name that is bound: variables, parameters, attributes, functions and classes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def violations_of_python(source: str) -> Iterator[tuple[int, str]]:
    exempt = {number for number, line in enumerate(source.splitlines(), 1) if MARKER in line}
    for line, text in words_of_python(source):
        if line not in exempt:
            for match in BANNED.finditer(text):
                yield line, f"banned word '{match.group()}'"
    for line, name in variables(source):
        if line in exempt:
            continue
        if name in PARTICIPLES:
            yield line, f"variable '{name}' is a participle: name it after what it holds"
        for part in re.split(r"_+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)):
            if part and BANNED.fullmatch(part):
                yield line, f"banned word '{part}' in the name '{name}'"


def violations_of_markdown(source: str) -> Iterator[tuple[int, str]]:
    fenced = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            continue
        if fenced or MARKER in line:
            continue
        for match in BANNED.finditer(re.sub(r"`[^`]*`|\]\([^)]*\)", " ", line)):
            yield number, f"banned word '{match.group()}'"


def violations(path: Path) -> list[str]:
    """Return the violations of one file as 'path:line: what'."""
    source = path.read_text(encoding="utf-8")
    check = violations_of_python if path.suffix == ".py" else violations_of_markdown
    return sorted({f"{path}:{line}: {what}" for line, what in check(source)})


def files_of(arguments: list[str]) -> Iterator[Path]:
    for argument in arguments:
        path = Path(argument)
        yield from sorted(p for p in path.rglob("*") if p.suffix in (".py", ".md")) if path.is_dir() else [path]


if __name__ == "__main__":
    complaints = [line for path in files_of(sys.argv[1:]) for line in violations(path)]
    print("\n".join(complaints))
    print(f"{len(complaints)} violations")
    sys.exit(bool(complaints))
