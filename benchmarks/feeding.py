"""Rate and memory of archives and loaders, and whether a gradient waits for them.

delivery   frames per CPU second and per second in one thread: read, verify, decompress, add deltas, shuffle, collate as
           float32. Context frames around a window are delivered, too, but not counted
memory     peak memory of one epoch with two loaders, for an archive and for one 20 times as large
waiting    with RECIPE and RUN: the network of the run trained from an archive; loader_s as a share of the learners' time
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import parser, run_main
from roundelay.data import writer
from roundelay.data.archive import Archive, ArchiveMetadata, Layout, encode
from roundelay.data.examples import Examples
from roundelay.data.loader import PrefetchLoader
from roundelay.errors import RoundelayError, UsageError

LAYOUT = Layout(window=21, context=10, dim=40, deltas=2, compressed=True)
BLOCK, LARGER, BATCHES = 256, 20, (32, 128)


def main(argv: Sequence[str]) -> int:
    p = parser("feeding", __doc__, "python -m benchmarks.feeding --json\n  python -m benchmarks.feeding spoken runs/spoken")
    p.add_argument("recipe", nargs="?", default="", metavar="RECIPE")
    p.add_argument("run", nargs="?", default="", metavar="RUN", help="its finished run directory")
    p.add_argument("--blocks", type=int, default=48, help=f"blocks of {BLOCK} examples in the small archive")
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--learners", type=int, default=2)
    p.add_argument("--epochs", type=float, default=0.5, help="of the training that is watched")
    p.add_argument("--quick", action="store_true", help="8 blocks, a tenth of an epoch")
    p.add_argument("--go-through", default="", metavar="ARCHIVE", help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.go_through:
        print(json.dumps(go_through(Path(args.go_through))))
        return 0
    if args.recipe and not args.run:
        raise UsageError("RECIPE without RUN", where="command line", hint="give both, or none")
    if args.quick:
        args.blocks, args.epochs, args.repeats = 8, 0.1, 2
    os.environ["OMP_NUM_THREADS"] = "1"
    folder = Path(tempfile.mkdtemp(prefix="roundelay-feeding-"))
    try:
        small = random_archive(folder / "small", args.blocks, 1)
        large = random_archive(folder / "large", args.blocks, LARGER)
        report: dict[str, Any] = {
            "delivery": [delivery(small, batch, args.repeats) for batch in BATCHES],
            "memory": [in_a_process(archive) for archive in (small, large)],
        }
    finally:
        shutil.rmtree(folder)
    if args.recipe:
        report["waiting"] = waiting(args)
    print(json.dumps(report) if args.json else table(report))
    return 0


def random_archive(folder: Path, blocks: int, times: int) -> Archive:
    """Write an archive of random features; every block is written `times` times."""
    random = np.random.default_rng(0)
    stored = LAYOUT.window + 2 * (LAYOUT.context + LAYOUT.reach)
    once = []
    for number in range(blocks):
        values = [random.integers(0, 256, (stored, LAYOUT.dim), np.uint8) for _ in range(BLOCK)]
        ranges = [np.stack([np.full(LAYOUT.dim, -2), np.full(LAYOUT.dim, 0.016)]).astype(np.float32)] * BLOCK
        targets = [random.integers(0, 500, LAYOUT.window).astype(np.int32) for _ in range(BLOCK)]
        numbers = np.arange(number * BLOCK, (number + 1) * BLOCK)
        data, frames = encode(LAYOUT, numbers, np.zeros((BLOCK, 2), int), values, ranges, targets)
        once.append(writer.EncodedBlock(data, BLOCK, frames, BLOCK * LAYOUT.window))

    def repeated() -> Iterator[writer.EncodedBlock]:
        for _ in range(times):
            yield from once

    return writer.write(folder, ArchiveMetadata(LAYOUT, 0, BLOCK, {}, 500), repeated())


def delivery(archive: Archive, batch: int, repeats: int) -> dict[str, Any]:
    """Batches of several epochs, one thread."""
    examples = Examples(archive)
    whole = len(examples) // batch * batch
    examples.batch(0, 0, batch)
    cpu, wall = [], []
    for epoch in range(repeats):
        began, used = time.perf_counter(), time.thread_time()
        for start in range(0, whole, batch):
            examples.batch(epoch, start, start + batch)
        frames = whole * LAYOUT.window
        cpu.append(frames / (time.thread_time() - used))
        wall.append(frames / (time.perf_counter() - began))
    return {
        "batch": batch, "frames_per_s_per_core": round(statistics.median(cpu)), "range": [round(min(cpu)), round(max(cpu))],
        "frames_per_s_wall": round(statistics.median(wall)), "repeats": repeats,
        "delivered_with_margins_per_s": round(statistics.median(cpu) * (1 + 2 * LAYOUT.context / LAYOUT.window)),
    }  # fmt: skip


def in_a_process(archive: Archive) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.feeding", "--go-through", str(archive.folder.resolve())]
    root = Path(__file__).resolve().parents[1]  # where `benchmarks` can be imported
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=root)
    return dict(json.loads(ended.stdout.splitlines()[-1]))


def go_through(folder: Path) -> dict[str, Any]:
    """One epoch with two loaders: memory before it, the most during it, and that everything came once."""
    examples = Examples(folder)
    batch = 64
    spans = [(start, min(start + batch, len(examples))) for start in range(0, len(examples), batch)]
    examples.batch(0, 0, batch)  # compiled, and the first pages touched
    before, most, seen = resident(), 0, 0
    checks = np.int64(0)
    for number, (_, batch_data) in enumerate(PrefetchLoader(spans, lambda span: examples.batch(0, *span), workers=2)):
        seen += len(batch_data.numbers)
        checks += batch_data.numbers.sum()
        if number % 16 == 0:
            most = max(most, resident())
    blocks = examples.archive.blocks
    times = len(examples) // (int(np.unique(blocks[:, 5]).size) * BLOCK) or 1
    once = len(examples) // times
    return {
        "examples": seen, "complete": bool(seen == len(examples) and checks == times * once * (once - 1) // 2),
        "archive_bytes": int(blocks[:, 2].sum()), "before_bytes": before, "peak_bytes": most, "growth_bytes": most - before,
    }  # fmt: skip


def resident() -> int:
    """Bytes of this process in memory, mapped files included."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return 1024 * int(line.split()[1])


def waiting(args: argparse.Namespace) -> dict[str, Any]:
    """The recipe's training, from an archive, with the recipe's strategy."""
    from roundelay import config
    from roundelay.recipes import config as recipe_config
    from roundelay.recipes.network_stage import training_config
    from roundelay.recipes.pipeline_context import PipelineContext
    from roundelay.recipes.run_layout import aligned_run

    run, recipe = aligned_run(args.run), recipe_config.load(args.recipe)
    recipe = replace(recipe, network=replace(recipe.network, packed=True))
    work = PipelineContext(recipe, run, 2, progress="plain")
    folder = Path(tempfile.mkdtemp(prefix="roundelay-waiting-"))
    try:
        settings = {
            **recipe.train, "learners": args.learners, "epochs": args.epochs, "eval_at_checkpoint": False,
            "checkpoint_every_epochs": 1e6, "progress": "none",
        }  # fmt: skip
        engine = training_config(work, settings, work.layout.alignments(), recipe.seed)
        (folder / "task.toml").write_text(config.dumps(engine))
        command = [sys.executable, "-m", "roundelay", "train", str(folder / "task.toml"), f"run={folder / 'run'}", "--json"]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if ended.returncode:
            raise RoundelayError(
                f"training ended with exit code {ended.returncode}", where=str(work.run), hint="see the lines above"
            )
        results = json.loads(ended.stdout.splitlines()[-1])
        ranks = list(results["ranks"].values()) or [results]
    finally:
        shutil.rmtree(folder)
    elapsed, loader = (sum(r.get(key, 0.0) for r in ranks) for key in ("elapsed_s", "loader_s"))
    return {
        "strategy": settings.get("strategy"), "learners": args.learners, "steps": sum(r["steps"] for r in ranks),
        "elapsed_s": round(elapsed, 3), "loader_s": round(loader, 4), "wait_share": round(loader / elapsed, 6),
    }  # fmt: skip


def table(report: dict[str, Any]) -> str:
    lines = [
        f"delivery, batches of {d['batch']}: {d['frames_per_s_per_core']:,} frames/s per core "
        f"({d['range'][0]:,} to {d['range'][1]:,}), {d['frames_per_s_wall']:,} by the clock"
        for d in report["delivery"]
    ]
    lines += [
        f"memory, archive of {m['archive_bytes'] / 1e6:.0f} MB: {m['before_bytes'] / 1e6:.0f} MB before the epoch, "
        f"{m['peak_bytes'] / 1e6:.0f} MB at most in it"
        for m in report["memory"]
    ]
    if "waiting" in report:
        w = report["waiting"]
        lines.append(
            f"waiting, {w['strategy']} with {w['learners']} learners: {w['loader_s']:.3f} s of {w['elapsed_s']:.1f} s "
            f"({100 * w['wait_share']:.2f} %)"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)
