"""Files that are complete or absent: flush, checksum, rename."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def digest(path: Path) -> str:
    """Return the SHA-256 of a file as hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file or folder to disk, so that a later rename cannot overtake its content."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def install(temporary: Path, final: Path) -> None:
    """Flush a file, rename it and flush the folder: after a crash `final` has its old content or all of the new one."""
    sync(temporary)
    os.replace(temporary, final)
    sync(final.parent)


def write_text(path: Path, text: str, owner: str) -> None:
    """Replace the content of a small file in one step. `owner` makes the temporary name unique among writers."""
    temporary = path.with_name(f".{path.name}.{owner}.partial")
    temporary.write_text(text, encoding="utf-8")
    install(temporary, path)
