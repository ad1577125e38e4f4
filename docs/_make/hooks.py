"""Hooks for mkdocs: add a page for every file outside docs/ that a page links to.

The pages are also read in the repository, so they link to examples, recipes and sources. On the site each of these files becomes
a page under files/, so that all links stay on the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
LANGUAGES = {".py": "python", ".toml": "toml"}


def outside(page: str, target: str) -> str | None:
    """Return the path in the repository that a link refers to, or None if it is inside docs/ or a URL."""
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
            page = File.generated(config, f"files/{path}.md", content=shown(path, source.read_text(encoding="utf-8")))
            page.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(page)
    return files


def shown(path: str, text: str) -> str:
    """Return a page that shows a file."""
    if path.endswith(".md"):
        return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return f"# {path}\n\n````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}\n````\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links to files outside docs/ by links to their pages."""

    def inside(match: re.Match[str]) -> str:
        path = outside(page.file.src_uri, match[2])
        if path is None or not (ROOT / path).is_file():
            return match[0]  # mkdocs reports the broken link
        return f"{match[1]}{posixpath.relpath(f'files/{path}.md', posixpath.dirname(page.file.src_uri))})"

    return markdown if page.file.src_uri.startswith("files/") else LINK.sub(inside, markdown)
