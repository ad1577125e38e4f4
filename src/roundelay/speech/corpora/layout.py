"""Helpers for corpora whose file names describe the recordings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

DIGITS = ("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE")


def matching_files(folder: Path, pattern: str) -> Iterator[tuple[Path, re.Match[str]]]:
    """Yield the .wav files below `folder` whose whole name matches `pattern`, sorted by path."""
    for path in sorted(folder.rglob("*.wav")):
        match = re.fullmatch(pattern, path.name)
        if match:
            yield path, match
