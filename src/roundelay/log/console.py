"""Messages that must reach stderr whether or not logging is configured."""

from __future__ import annotations

import sys


def print_error(text: str) -> None:
    """Print `roundelay: text` to stderr."""
    print(f"roundelay: {text}", file=sys.stderr, flush=True)
