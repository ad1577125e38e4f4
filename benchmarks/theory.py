"""Convergence theorems compared with the engine in virtual time.

Gradient norm.  The theorems of D-PSGD and AD-PSGD bound the mean over K rounds of |grad f(mean of the learners)|^2 by a
constant over sqrt(K L), at a rate proportional to sqrt(L / K), for large K. The table runs this rate on a small non-convex
problem and fits the exponents of K and L; the theorems say -1/2 and -1/2.

Contraction.  With a rate of zero the learners only average: the factor per round by which their squared spread falls,
compared with that of the matrices (topology).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.common import log, parser, run_main
from benchmarks.sim_probe import MeanProbe, one_thread
from roundelay import topology
from roundelay.engine.config import TrainConfig
from roundelay.engine.learner import Learner
from roundelay.errors import UsageError, did_you_mean
from roundelay.log.output import markdown_table
from roundelay.simulate.cluster import Cluster, MachineGroup, SpeedModel
from roundelay.simulate.run import simulate_task
from roundelay.simulate.simulated_cluster import PLAIN

BATCH = 1
RATE = 4.0
"""c in the rate c sqrt(L / K)."""
ROUNDS = (128, 256, 512)
LEARNERS = (1, 2, 4, 8)
SEEDS = 2
DRAWS = 40
"""Seeds over which what is drawn is averaged."""
CONTESTANTS: dict[str, tuple[str, str]] = {
    "sync": ("sync", "ring"),
    "delay_by_one": ("delay_by_one", "ring"),
    "dpsgd, ring": ("dpsgd", "ring"),
    "adpsgd, ring": ("adpsgd", "ring"),
    "adpsgd, random_ring": ("adpsgd", "random_ring"),
}


@dataclass(frozen=True)
class NonConvexRegression:
    """Regression with a loss that is not convex: r^2 / (1 + r^2), where r is a linear model's error on noisy targets."""

    samples: int
    features: int = 10
    points: int = 1000
    noise: float = 0.5
    seed: int = 0

    def _data(self) -> tuple[Tensor, Tensor]:
        rng = np.random.default_rng(5)
        x = rng.standard_normal((self.points, self.features)) / math.sqrt(self.features)
        y = x @ rng.standard_normal(self.features) + self.noise * rng.standard_normal(self.points)
        return torch.from_numpy(x), torch.from_numpy(y)

    def build(self) -> nn.Module:
        module = nn.Linear(self.features, 1, bias=False).double()
        nn.init.zeros_(module.weight)
        return module

    def batch(self, epoch: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Drawn with replacement, as the theorems have it."""
        x, y = cached_data(self)
        indices = torch.from_numpy(np.random.default_rng([self.seed, epoch, start]).integers(self.points, size=stop - start))
        return x[indices], y[indices]

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        r2 = (module(batch[0]).squeeze(1) - batch[1]).square()
        return (r2 / (1 + r2)).mean()

    def gradient(self, w: Tensor) -> Tensor:
        """Of the whole, at w."""
        x, y = cached_data(self)
        r = x @ w - y
        return x.T @ (2 * r / (1 + r.square()).square()) / self.points

    def evaluate(self, module: nn.Module, part: int, parts: int) -> dict[str, tuple[float, float]]:
        x, y = (t[part::parts] for t in cached_data(self))
        with torch.no_grad():
            return {"loss": (float(self.loss(module, (x, y))) * len(y), float(len(y)))}


_KEPT: dict[tuple[int, int, float], tuple[Tensor, Tensor]] = {}


def cached_data(task: NonConvexRegression) -> tuple[Tensor, Tensor]:
    key = (task.features, task.points, task.noise)
    if key not in _KEPT:
        _KEPT[key] = task._data()
    return _KEPT[key]


def cluster_of(size: int, even: bool = False) -> Cluster:
    """Equal learners, with a little jitter or in step; exchanges are short compared with gradients."""
    module = replace(PLAIN, machines=(MachineGroup(1, size),))
    return replace(module, learner=replace(module.learner, jitter=SpeedModel("constant"))) if even else module


def gradient_norm(strategy: str, ring: str, rounds: int, size: int, seed: int) -> float:
    """The mean of |grad f(mean)|^2 over a run of `rounds` rounds at the theorem's rate."""
    task = NonConvexRegression(samples=rounds * size * BATCH, seed=seed)
    norms: list[float] = []
    watch = MeanProbe(size * BATCH, lambda time, samples, mean, spread: norms.append(float(task.gradient(mean).square().sum())))
    config = TrainConfig(
        strategy=strategy, topology=ring, log_every_s=1e9, epochs=1.0, batch=BATCH, lr=RATE * math.sqrt(size / rounds),
        momentum=0.0, eval_at_checkpoint=False, progress="none", checkpoint_every_epochs=1e9,
    )  # fmt: skip
    simulate_task(cluster_of(size), task, config, seed=seed, on_step=watch)
    return sum(norms) / len(norms)


def fit(values: dict[tuple[int, int], float]) -> tuple[float, float]:
    """The exponents of K and of L in value = c K^p L^q, by least squares of logarithms."""
    rows = np.array([[1.0, math.log(K), math.log(L)] for K, L in values])
    report = np.linalg.lstsq(rows, np.log(np.array(list(values.values()))), rcond=None)[0]
    return float(report[1]), float(report[2])


# -- contraction -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ZeroGradientTask:
    """No gradient at all: learners only average."""

    samples: int
    width: int = 64

    def build(self) -> nn.Module:
        return nn.Linear(self.width, 1, bias=False).double()

    def batch(self, epoch: int, start: int, stop: int) -> int:
        return stop - start

    def loss(self, module: nn.Module, batch: int) -> Tensor:
        return sum(p.sum() * 0.0 for p in module.parameters())  # type: ignore[return-value]

    def evaluate(self, module: nn.Module, part: int, parts: int) -> dict[str, tuple[float, float]]:
        return {"loss": (0.0, 1.0)}


def contraction(strategy: str, ring: str, size: int) -> float:
    """The factor per round by which the squared spread of the engine's learners falls, when they run in step."""
    if topology.topology(ring).random:
        # the theorem is about the expectation, and rounds are independent: average the ratios, not their logarithms
        ratios = [after / before for seed in range(DRAWS) for before, after in pairs(spreads(strategy, ring, size, 14, seed))]
        return sum(ratios) / len(ratios)
    seen = spreads(strategy, ring, size, 60, 0)
    if len(seen) < 4:
        return 0.0  # all agree within a period
    late = seen[len(seen) // 2 :]  # by then only the slowest mode is left, whose rate is the promise
    slope = np.polyfit([r for r, _ in late], [math.log(s) for _, s in late], 1)[0]
    return math.exp(float(slope))


def pairs(seen: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(before, after) for (_, before), (_, after) in pairwise(seen)]


def spreads(strategy: str, ring: str, size: int, rounds: int, seed: int) -> list[tuple[float, float]]:
    """(rounds played, squared spread) as the engine goes along, down to where rounding takes over."""
    seen: list[tuple[float, float]] = []
    learners: dict[int, Learner] = {}

    def on_step(learner: Learner) -> None:
        worker = learner.worker
        if learner.rank not in learners:
            start = torch.from_numpy(np.random.default_rng([seed, learner.rank]).standard_normal(worker.w.numel()))
            learners[learner.rank] = learner
            worker.assign_(start)
            return
        if len(learners) == size and learner.rank == 0:
            all_w = torch.stack([one.worker.w for one in learners.values()])
            if worker.shared_weights is None:
                done = float(worker.k)
            else:  # every write that is neither a step nor the placing above is a exchange
                writes = [
                    one.worker.shared_weights.version - one.worker.k - 1
                    for one in learners.values()
                    if one.worker.shared_weights
                ]
                done = sum(writes) / size
            seen.append((done, float((all_w - all_w.mean(0)).square().sum())))

    config = TrainConfig(
        strategy=strategy, topology=ring, seed=seed, log_every_s=1e9, epochs=1.0, batch=1, lr=0.0, momentum=0.0,
        eval_at_checkpoint=False, progress="none", checkpoint_every_epochs=1e9,
    )  # fmt: skip
    simulate_task(cluster_of(size, even=True), ZeroGradientTask(size * rounds), config, seed=seed, on_step=on_step)
    floor = 1e-24 * seen[0][1]
    good = [(r, s) for r, s in seen[1:] if s > floor]
    gone = [(r, 0.0) for r, s in seen[len(good) + 1 :][:1]]  # by luck of the draw all may agree at once
    return good + (gone if topology.topology(ring).random else [])


def predicted_contraction(strategy: str, ring: str, size: int) -> float:
    if strategy == "dpsgd":
        return topology.spectrum(topology.neighbor_matrix(ring, size)).second ** 2
    return topology.contraction(ring, size)


def main(argv: Sequence[str]) -> int:
    p = parser("theory", __doc__, "python -m benchmarks.theory --quick")
    p.add_argument("--quick", action="store_true", help="fewer rounds, learners and seeds: shows that it runs, proves little")
    p.add_argument("--competitors", default=";".join(CONTESTANTS), help="only these, separated by ;")
    p.add_argument("--sizes", default="4,8,16,32", help="learners whose contraction is measured; empty: none")
    args = p.parse_args(argv)
    one_thread()
    names, sizes = [n.strip() for n in args.competitors.split(";") if n.strip()], [int(n) for n in args.sizes.split(",") if n]
    unknown = [n for n in names if n not in CONTESTANTS]
    if unknown:
        raise UsageError(f"there is no contestant '{unknown[0]}'", where="theory", hint=did_you_mean(unknown[0], CONTESTANTS))
    if args.quick:
        report = table(names[:2], ROUNDS[:2], LEARNERS[:2], 1, sizes[:1])
    else:
        report = table(names, ROUNDS, LEARNERS, SEEDS, sizes)
    print(json.dumps(report) if args.json else show(report))
    return 0


def table(
    names: Sequence[str], rounds: Sequence[int], learners: Sequence[int], seeds: int, sizes: Sequence[int]
) -> dict[str, Any]:
    norms = []
    for name in names:
        strategy, ring = CONTESTANTS[name]
        values: dict[tuple[int, int], float] = {}
        for K in rounds:
            for L in learners:
                values[K, L] = sum(gradient_norm(strategy, ring, K, L, seed) for seed in range(seeds)) / seeds
        p, q = fit(values)
        log(f"{name:<22} exponent of K {p:+.3f}, of L {q:+.3f}")
        by_learners = {str(L): values[rounds[-1], L] for L in learners}
        # the norm goes like (K L)^(-1/2): L learners reach in K / L^(q/p) rounds what one reaches in K
        speedup = {str(L): (values[rounds[-1], learners[0]] / values[rounds[-1], L]) ** (1 / -p) for L in learners}
        norms.append(
            {
                "contestant": name, "exponent_K": p, "exponent_L": q, "norm_at_most_rounds": by_learners, "speedup": speedup,
                "values": [{"K": K, "L": L, "norm2": v} for (K, L), v in values.items()],
            }
        )  # fmt: skip
    contractions = []
    for size in sizes:
        for strategy, ring in (("dpsgd", "ring"), ("adpsgd", "ring"), ("adpsgd", "random_ring")):
            predicted = predicted_contraction(strategy, ring, size)
            measured = contraction(strategy, ring, size)
            log(f"{strategy:<8} {ring:<12} {size:>3} learners: contraction {measured:.4f}, predicted {predicted:.4f}")
            contractions.append(
                {"strategy": strategy, "topology": ring, "learners": size, "measured": measured, "predicted": predicted}
            )
    about = {"rounds": list(rounds), "learners": list(learners), "seeds": seeds, "batch": BATCH, "rate": f"{RATE} sqrt(L / K)"}
    return {"gradient_norm": norms, "contraction": contractions, **about, "theorem": {"exponent_K": -0.5, "exponent_L": -0.5}}


def show(report: dict[str, Any]) -> str:
    learners, last = report["learners"], report["rounds"][-1]
    head = ["strategy", "exponent of K (theorem -0.5)", "exponent of L (theorem -0.5)"]
    head += [f"mean grad^2, K={last}, L={L}" for L in learners]
    rows = [
        [n["contestant"], n["exponent_K"], n["exponent_L"], *(n["norm_at_most_rounds"][str(L)] for L in learners)]
        for n in report["gradient_norm"]
    ]
    second = [[c["strategy"], c["topology"], c["learners"], c["measured"], c["predicted"]] for c in report["contraction"]]
    return (
        markdown_table(head, rows)
        + "\n\n"
        + markdown_table(["strategy", "topology", "learners", "contraction per round, measured", "predicted"], second)
    )


if __name__ == "__main__":
    run_main(main)
