"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def add_settings(parser: argparse.ArgumentParser, help: str) -> None:
    """Add `key=value` items, which may appear before or after options."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=help)


def add_json(parser: argparse.ArgumentParser, help: str = "print JSON") -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help=help)


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """Add --jobs."""
    jobs = os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=jobs, help=f"number of processes (default {jobs})")


def note(text: str) -> None:
    """Print a message for the user on stderr; stdout is for results."""
    print(text, file=sys.stderr, flush=True)


def next_run_dir(name: str, strategy: str) -> Path:
    """Return runs/NAME-STRATEGY-N with the first N that does not exist. Nothing is created."""
    stem = f"{name}-{strategy.replace('(', '-').replace(')', '').replace(':', '.')}"
    number = 1
    while (Path("runs") / f"{stem}-{number}").exists():
        number += 1
    return Path("runs") / f"{stem}-{number}"
