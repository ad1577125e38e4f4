"""Messages that must reach stderr whether or not logging is configured."""

from __future__ import annotations

import sys
from contextlib import suppress


def print_error(text: str) -> None:
    """Print `roundelay: text` to stderr. Does not raise if stderr cannot be written."""
    with suppress(OSError):
        print(f"roundelay: {text}", file=sys.stderr, flush=True)
