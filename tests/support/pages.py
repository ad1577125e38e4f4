"""Parse the executable parts of documentation pages: commands with their output, code, files.

```console      lines that begin with "$ " are commands, run in the order of the page; the lines after one are its output.
                "…" as a whole line matches any lines, inside a line any text.
```python       is executed, all blocks of a page in one namespace, in order with the commands.
```toml bash json   must be valid. ```text is not checked and may not contain a command.
`roundelay …`   in running text is also a command. With NAMES IN CAPITALS it is a pattern and only parsed.

A comment before a fence adds options:
<!-- file: PATH -->        write the block to PATH before later commands run
<!-- measured -->          the numbers of the output vary: compare the output without them
<!-- exit: N -->           the commands of the block exit with code N
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "src" / "roundelay" / "recipes").glob("*/*.md")),
]
PROGRAMS = ("roundelay", "sudo", "torchrun", "python", "make", "mpirun", "srun", "sbatch", "git", "pip")
FENCE = re.compile(r"^(\s*)(`{3,})(\w*)\s*$")
MARK = re.compile(r"^\s*<!-- (file|measured|exit)(?:: (\S+))? -->\s*$")
INLINE = re.compile(r"(?<!`)`((?:roundelay|sudo roundelay|torchrun|python|make|pip install|mpirun) [^`]+)`(?!`)")


@dataclass(frozen=True)
class Command:
    """A command of a page."""

    page: str
    line: int
    text: str
    output: tuple[str, ...] = ()
    measured: bool = False
    exit: int = 0
    inline: bool = False

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Block:
    """A fenced block other than a console block."""

    page: str
    line: int
    language: str
    text: str
    file: str = ""

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass
class Page:
    """The commands and blocks of a page, in order."""

    name: str
    items: list[Command | Block] = field(default_factory=list)

    @property
    def commands(self) -> list[Command]:
        return [item for item in self.items if isinstance(item, Command)]

    @property
    def blocks(self) -> list[Block]:
        return [item for item in self.items if isinstance(item, Block)]


def read(path: Path) -> Page:
    """Parse a page."""
    page = Page(str(path.relative_to(ROOT)))
    lines = path.read_text(encoding="utf-8").splitlines()
    marks: dict[str, str] = {}
    number = 0
    while number < len(lines):
        line = lines[number]
        opened = FENCE.match(line)
        if opened:
            end = number + 1
            while end < len(lines) and lines[end].strip() != opened[2]:
                end += 1
            body = [text.removeprefix(opened[1]) for text in lines[number + 1 : end]]
            if opened[3] == "console":
                page.items += commands(page.name, number + 2, body, marks)
            else:
                page.items.append(Block(page.name, number + 1, opened[3], "\n".join(body) + "\n", marks.get("file", "")))
            marks, number = {}, end + 1
            continue
        if mark := MARK.match(line):
            marks[mark[1]] = mark[2] or "yes"
            number += 1
        elif not line.strip():
            number += 1
        else:
            end = number
            while end < len(lines) and lines[end].strip() and not FENCE.match(lines[end]) and not MARK.match(lines[end]):
                end += 1
            page.items += inline(page.name, number + 1, "\n".join(lines[number:end]))
            marks, number = {}, end
    return page


def inline(page: str, first: int, paragraph: str) -> list[Command]:
    """Return the commands in running text. A command may continue on the next line."""
    return [
        Command(page, first + paragraph[: match.start()].count("\n"), " ".join(match[1].split()), inline=True)
        for match in INLINE.finditer(paragraph)
    ]


def commands(page: str, first: int, body: list[str], marks: dict[str, str]) -> list[Command]:
    """Return the commands of a console block, each with its expected output."""
    rows: list[tuple[int, str, list[str]]] = []
    continued = False
    for number, line in enumerate(body, first):
        if continued:
            at, text, output = rows.pop()
            rows.append((at, text.rstrip("\\").rstrip() + " " + line.strip(), output))
        elif line.startswith("$ "):
            rows.append((number, line[2:], []))
        elif not rows:
            raise AssertionError(f"{page}:{number}: a console block must begin with a command: $ roundelay …")
        else:
            rows[-1][2].append(line)
        continued = (continued or line.startswith("$ ")) and line.rstrip().endswith("\\")
    return [
        Command(page, at, without_comment(text), tuple(output), "measured" in marks, int(marks.get("exit", 0)))
        for at, text, output in rows
    ]


def without_comment(text: str) -> str:
    return re.sub(r"\s+# .*$", "", text).strip()


def is_pattern(text: str) -> bool:
    """Return True if a command has placeholders: NAMES IN CAPITALS, key=value, an ellipsis."""
    return bool(re.search(r"(?:^|[\s=]|benchmarks\.)[A-Z][A-Z_]*\b(?!=)|key=value|…|\.\.\.", text))


# ------------------------------------------------------------------------------------------------ comparing output


def same(expected: tuple[str, ...], printed: str, measured: bool) -> bool:
    """Return True if the output matches the page."""

    def plain(text: str) -> str:
        text = " ".join(text.split())
        return re.sub(r"[+-]?\d[\d,]*(?:\.\d+)?", "0", text) if measured else text

    wanted = [plain(line) for line in expected]
    while wanted and not wanted[-1]:
        wanted.pop()
    pattern = ""
    for line in wanted:
        pattern += r"(?:.*\n)*?" if line == "…" else ".*?".join(map(re.escape, line.split("…"))) + r"\n"
    lines = [plain(line) for line in printed.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return re.fullmatch(pattern, "".join(line + "\n" for line in lines)) is not None
