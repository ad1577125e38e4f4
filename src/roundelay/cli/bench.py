"""roundelay bench: forward to one benchmark."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

BENCHES = {"throughput": "roundelay.bench.throughput", "network": "roundelay.bench.network"}
EXAMPLES = """  roundelay bench throughput --quick
  roundelay bench network --quick"""


def main(argv: Sequence[str]) -> int:
    """Run one benchmark with its own arguments."""
    parser = argparse.ArgumentParser(
        prog="roundelay bench", description="Measure on this machine.", epilog=f"examples:\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("which", choices=list(BENCHES), metavar="WHICH", help=", ".join(BENCHES))
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="…", help="options: roundelay bench WHICH --help")
    args = parser.parse_args(argv)
    return int(importlib.import_module(BENCHES[args.which]).main(args.rest) or 0)
