"""Read damaged files with every reader and count tracebacks, hangs and executed payloads.

Print one JSON object. Exit code 1 if there was anything but a message.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import parser, run_main

TESTS = Path(__file__).parents[1] / "tests"


def main(argv: Sequence[str]) -> int:
    p = parser("fuzz", __doc__, "python -m benchmarks.fuzz 20000")
    p.add_argument("cases", type=int, help="damaged files over all readers")
    p.add_argument("--only", default="", help="name of one reader")
    p.add_argument("--first", type=int, default=0, help="seed of the first case")
    args = p.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path[:0] = [str(TESTS / "fuzz"), str(TESTS / "support")]
    from readers import READERS, fuzz

    chosen = [reader for reader in READERS if args.only in ("", reader.name)]
    rows = {}
    for n, reader in enumerate(chosen):
        count = args.cases // len(chosen) + (n < args.cases % len(chosen))
        with tempfile.TemporaryDirectory() as folder:
            outcome = fuzz(reader, Path(folder), count, args.first)
        rows[reader.name] = {
            "cases": outcome.cases,
            "tracebacks": len(outcome.tracebacks),
            "hangs": len(outcome.hangs),
            "executed": outcome.executed,
            "examples": [*outcome.tracebacks[:5], *outcome.hangs[:5]],
        }
        print(f"{reader.name}: {outcome.cases} cases, {len(outcome.tracebacks)} tracebacks", file=sys.stderr, flush=True)
    total = {key: sum(int(row[key]) for row in rows.values()) for key in ("cases", "tracebacks", "hangs", "executed")}
    print(json.dumps({**total, "readers": rows}, indent=1))
    return int(total["tracebacks"] + total["hangs"] + total["executed"] > 0)


if __name__ == "__main__":
    run_main(main)
