"""What mkdocs does with these pages beyond turning them into HTML.

The pages are written for readers of the repository, too, so they link to files outside docs/: examples, recipes, sources. On the
site each of these becomes a page of its own under files/, so that no link leads out of it.
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
    """The path in the repository that a link leads to, if that lies outside docs/."""
    if re.match(r"[a-z]+:", target):
        return None
    found = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return None if found.startswith("docs/") or found == "docs" else found


def on_files(files: Files, config: Any) -> Files:
    """Adds a page for every file outside docs/ that some page links to."""
    wanted: set[str] = set()
    for file in list(files):
        if file.src_uri.endswith(".md"):
            for _, target, _ in LINK.findall(Path(str(file.abs_src_path)).read_text(encoding="utf-8")):
                if path := outside(file.src_uri, target):
                    wanted.add(path)
    for path in sorted(wanted):
        source = ROOT / path
        if source.is_file():
            made = File.generated(config, f"files/{path}.md", content=shown(path, source.read_text(encoding="utf-8")))
            made.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(made)
    return files


def shown(path: str, text: str) -> str:
    """A page that shows a file."""
    if path.endswith(".md"):
        return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return f"# {path}\n\n````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}\n````\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links out of docs/ into links to the pages made of them."""

    def inside(found: re.Match[str]) -> str:
        path = outside(page.file.src_uri, found[2])
        if path is None or not (ROOT / path).is_file():
            return found[0]  # a dead link stays one, and mkdocs says so
        return f"{found[1]}{posixpath.relpath(f'files/{path}.md', posixpath.dirname(page.file.src_uri))})"

    return markdown if page.file.src_uri.startswith("files/") else LINK.sub(inside, markdown)
