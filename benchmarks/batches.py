"""The largest batch that each strategy bears, with learning in virtual time, on a fixed grid.

16 learners, a one-layer bidirectional LSTM, 4, 12 and 48 samples per learner, about 400,000 samples per run. The rate is
scaled linearly with the batch, times 1/2, 1 and 2, without warm-up; three seeds at the best rate. Controls: warm-up at the
largest batch, `single` at the small batch, and synchronous SGD whose gradients are taken at weights with Gaussian noise as
large as the spread of the randomized ring. Takes hours; with --keep FILE an interrupted run is resumed.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.common import log, parser, run_main
from benchmarks.sim_probe import ResultCache, learn, one_thread
from benchmarks.stragglers import CLUSTER
from roundelay.core.interrupts import block_sigint
from roundelay.engine.config import TrainConfig
from roundelay.errors import RoundelayError
from roundelay.log.output import markdown_table
from roundelay.simulate.cluster import MachineGroup
from roundelay.strategies.base import Traits
from roundelay.strategies.worker import Worker
from roundelay.testing.tasks import SyntheticFrames

SIZE = 16
BATCHES = (4, 12, 48)
FACTORS = (0.5, 1.0, 2.0)
SEEDS = 3
TASK = SyntheticFrames(samples=40_960, held_out=512, hidden=32, frames=8)
EPOCHS = 10.0
RATE = 0.5
"""For the small batch, 64 samples in all; scaled linearly from there. The best of 1/8, 1/4, 1/2 and 1 for `single`."""
CONTESTANTS = {
    "sync": ("sync", "ring"),
    "adpsgd, ring": ("adpsgd", "ring"),
    "adpsgd, random_ring": ("adpsgd", "random_ring"),
    "delay_by_one": ("delay_by_one", "ring"),
}
NOISY = "sync + noise"
LOOKS = 8


@dataclass
class NoisySync:
    """Synchronous SGD whose gradients are taken at w + noise: does any noise do what the spread between learners does?

    w <- w - D(mean_j g_j(w + n_j)),     |n_j| = size * |w|
    """

    size: float = 0.0
    equation: ClassVar[str] = "w <- w - D(mean_j g_j(w + n_j))"
    reference: ClassVar[str] = "the control in Zhang et al. 2021"
    advice: ClassVar[str] = "A control."
    weakness: ClassVar[str] = "As sync."
    saved: ClassVar[tuple[str, ...]] = ()
    traits: ClassVar[Traits] = Traits(
        sharding="static", deterministic=True, conserves_mean=True, contracts=False, survives_failures=False,
        optimizer_state="shared", shares_weights=False, sample_weighting="average",
    )  # fmt: skip

    def start(self, me: Worker) -> None:
        """Nothing to prepare."""

    def step(self, me: Worker) -> None:
        w = me.w.clone()
        rng = torch.Generator().manual_seed(1_000_003 * me.rank + me.k)
        noise = torch.randn(w.numel(), generator=rng, dtype=w.dtype)
        me.assign_(w + noise * (self.size * w.norm() / math.sqrt(w.numel())))
        d = me.delta(me.mean_grad())
        me.assign_(w - d)


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    contestant: str
    batch: int
    factor: float
    seed: int = 0
    warmup: float = 0.0
    noise: float = 0.0
    epochs: float = EPOCHS
    samples: int = field(default=TASK.samples)

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def run(cell: Cell) -> dict[str, Any]:
    """Trains one cell; a run that diverges has an infinite loss."""
    one_thread()
    strategy, ring = CONTESTANTS.get(cell.contestant, ("single", "ring"))
    settings: dict[str, Any] = {}
    if cell.contestant == NOISY:
        strategy, settings = "benchmarks.batches:NoisySync", {"size": cell.noise}
    size = 1 if strategy == "single" else SIZE
    batch = cell.batch * SIZE if size == 1 else cell.batch
    rate = RATE * cell.factor * cell.batch / BATCHES[0]
    config = TrainConfig(
        strategy=strategy, strategy_options=settings, topology=ring, seed=cell.seed, schedule="cosine",
        warmup_epochs=cell.warmup, log_every_s=1e9, epochs=cell.epochs, batch=batch, lr=rate, momentum=0.9,
    )  # fmt: skip
    task = replace(TASK, seed=cell.seed, samples=cell.samples)
    cluster = replace(CLUSTER, machines=(MachineGroup(size, 1),))
    learned = learn(cluster, task, config, looks=LOOKS, seed=cell.seed, effective=size > 1)
    looks = [asdict(look) for look in learned.looks]
    return {
        "loss": learned.loss if math.isfinite(learned.loss) else None,
        "rate": rate,
        "spread": statistics.fmean(look["spread"] for look in looks) if looks else None,
        "looks": looks,
    }


def main(argv: Sequence[str]) -> int:
    p = parser("batches", __doc__, "python -m benchmarks.batches --keep batches.jsonl --jobs 2")
    p.add_argument("--quick", action="store_true", help="a hundredth of the samples, two batches, one seed: shows that it runs")
    p.add_argument("--keep", metavar="FILE", help="results are kept here line by line; what is there is not run again")
    p.add_argument("--jobs", type=int, default=1, help="processes")
    args = p.parse_args(argv)
    grid = Grid(ResultCache(Path(args.keep) if args.keep else None), args.jobs, args.quick)
    report = grid.table()
    print(json.dumps(report) if args.json else show(report))
    return 0


class Grid:
    """The grid, run in an order that each stage can build on."""

    def __init__(self, cache: ResultCache, jobs: int, quick: bool) -> None:
        self.cache, self.jobs, self.quick = cache, jobs, quick
        self.batches = BATCHES[:2] if quick else BATCHES
        self.factors = (1.0,) if quick else FACTORS
        self.seeds = 1 if quick else SEEDS

    def cell(self, contestant: str, batch: int, factor: float, **more: Any) -> Cell:
        learned = Cell(contestant, batch, factor, **more)
        return replace(learned, epochs=1.0, samples=TASK.samples // 20) if self.quick else learned

    def run_all(self, cells: Sequence[Cell]) -> None:
        wanted = [cell for cell in dict.fromkeys(cells) if cell.key not in self.cache.rows]
        if self.jobs == 1:
            for cell in wanted:
                self._take(cell, run(cell))
            return
        with ProcessPoolExecutor(self.jobs, get_context("spawn")) as pool:
            try:
                with block_sigint():
                    results = pool.map(run, wanted)
                for cell, result in zip(wanted, results, strict=True):
                    self._take(cell, result)
            except BrokenProcessPool:
                hint = "use fewer jobs if memory ran out; with --keep the same command resumes"
                raise RoundelayError("a worker process died", where=f"one of {self.jobs} jobs", hint=hint) from None
            except KeyboardInterrupt:
                for child in active_children():
                    child.kill()  # a cell takes minutes
                raise

    def _take(self, cell: Cell, result: dict[str, Any]) -> None:
        self.cache.get(cell.key, lambda: result)
        loss = "diverged" if result["loss"] is None else f"{result['loss']:.4f}"
        log(f"{cell.contestant:<20} batch {cell.batch:>3}  rate x {cell.factor:g}  seed {cell.seed}  {loss}")

    def loss(self, cell: Cell) -> float:
        report = self.cache.rows[cell.key]["loss"]
        return math.inf if report is None else float(report)

    def best(self, name: str, batch: int, **more: Any) -> float:
        """The best factor, by the first seed."""
        return min(self.factors, key=lambda factor: self.loss(self.cell(name, batch, factor, **more)))

    def table(self) -> dict[str, Any]:
        names = list(CONTESTANTS)
        self.run_all([self.cell(n, b, f) for b in reversed(self.batches) for n in names for f in self.factors])
        self.run_all([self.cell("single", self.batches[0], f) for f in self.factors])
        largest = self.batches[-1]
        noise = {b: self.cache.rows[self.cell("adpsgd, random_ring", b, 1.0).key]["spread"] or 0.0 for b in self.batches}
        self.run_all([self.cell(NOISY, b, f, noise=noise[b]) for b in self.batches for f in self.factors])
        warm = 0.1 * EPOCHS
        self.run_all([self.cell(n, largest, f, warmup=warm) for n in names for f in self.factors])
        again = [self.cell(n, b, self.best(n, b), seed=s) for n in names for b in self.batches for s in range(1, self.seeds)]
        self.run_all(again)
        rows = [self.row(n, b) for b in self.batches for n in names]
        rows += [self.row(NOISY, b, seeds=1, noise=noise[b]) for b in self.batches]
        rows += [{**self.row(n, largest, seeds=1, warmup=warm), "contestant": f"{n}, warm-up"} for n in names]
        rows.append(self.row("single", self.batches[0], seeds=1))
        about = {"learners": SIZE, "samples_per_run": int(EPOCHS * TASK.samples), "factors": self.factors, "quick": self.quick}
        return {"results": rows, **about}

    def row(self, name: str, batch: int, seeds: int | None = None, **more: Any) -> dict[str, Any]:
        best = self.best(name, batch, **more)
        cells = [self.cell(name, batch, best, seed=s, **more) for s in range(seeds or self.seeds)]
        losses = [self.loss(cell) for cell in cells]
        looks = self.cache.rows[cells[0].key]["looks"]
        ratios = [look["effective"] for look in looks if look["effective"] is not None]
        return {
            "contestant": name,
            "batch": batch,
            "best_factor": best,
            "loss": finite(statistics.median(losses)),
            "range": [finite(min(losses)), finite(max(losses))],
            "by_factor": {str(f): finite(self.loss(self.cell(name, batch, f, **more))) for f in self.factors},
            "spread": self.cache.rows[cells[0].key]["spread"],
            "effective_rate_first_and_last": [ratios[0], ratios[-1]] if ratios else None,
        }


def finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def show(report: dict[str, Any]) -> str:
    rows = [
        [
            r["contestant"], r["batch"], r["best_factor"], r["loss"],
            *(r["by_factor"][str(f)] for f in report["factors"]), r["spread"],
            None if r["effective_rate_first_and_last"] is None
            else " -> ".join(f"{x:.3f}" for x in r["effective_rate_first_and_last"]),
        ]
        for r in report["results"]
    ]  # fmt: skip
    head = ["", "batch per learner", "best factor", "held-out loss", *(f"rate x {f:g}" for f in report["factors"])]
    return markdown_table([*head, "spread", "effective rate, first -> last"], rows) + "\n\n('-': diverged)"


if __name__ == "__main__":
    run_main(main)
