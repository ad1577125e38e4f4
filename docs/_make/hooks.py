"""Hooks of mkdocs: pages for linked files outside docs/, and formulas as MathML.

The pages are also read in the repository, so they link to files outside docs/: examples, recipes, sources. On the site each of these becomes a
page under files/, so that no link leads out of the site. Formulas ($…$ and $$…$$) become MathML when the site is built: no script is needed.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
LANGUAGES = {".py": "python", ".toml": "toml"}
CODE = re.compile(r"(^```.*?^```[^\n]*$|^````.*?^````[^\n]*$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\\$\w])\$([^\s$](?:[^$\n]*[^\s$])?)\$(?![\w$])", re.DOTALL)


def outside(page: str, target: str) -> str | None:
    """Return the repository path that a link leads to, or None if it lies in docs/ or is a URL."""
    if re.match(r"[a-z]+:", target):
        return None
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return None if path.startswith("docs/") or path == "docs" else path


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every file outside docs/ that a page links to."""
    wanted: set[str] = set()
    for file in list(files):
        if file.src_uri.endswith(".md"):
            for _, target, _ in LINK.findall(Path(str(file.abs_src_path)).read_text(encoding="utf-8")):
                if path := outside(file.src_uri, target):
                    wanted.add(path)
    for path in sorted(wanted):
        source = ROOT / path
        if source.is_file():
            page = File.generated(config, f"files/{path}.md", content=page_of(path, source.read_text(encoding="utf-8")))
            page.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(page)
    return files


def page_of(path: str, text: str) -> str:
    """Return a Markdown page that shows a file."""
    if path.endswith(".md"):
        return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return f"# {path}\n\n````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}\n````\n"


def mathematics(markdown: str) -> str:
    """Replace $…$ and $$…$$ by MathML, except in code."""

    def formula(match: re.Match[str]) -> str:
        if match[1] is not None:
            return f'\n<div class="formula">{convert(match[1].strip(), display="block")}</div>\n'
        return f"<span>{convert(match[2])}</span>"  # a line that begins with <math> would end the paragraph

    parts = CODE.split(markdown)
    return "".join(part if number % 2 else FORMULA.sub(formula, part) for number, part in enumerate(parts))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links out of docs/ into links to the generated pages, and formulas into MathML."""
    if page.file.src_uri.startswith("files/"):
        return markdown

    def inside(match: re.Match[str]) -> str:
        path = outside(page.file.src_uri, match[2])
        if path is None or not (ROOT / path).is_file():
            return match[0]  # mkdocs reports a dead link
        return f"{match[1]}{posixpath.relpath(f'files/{path}.md', posixpath.dirname(page.file.src_uri))})"

    return mathematics(LINK.sub(inside, markdown))
