"""The conformance suite: laws that every strategy keeps on every backend.

    from roundelay.testing.conformance import check_strategy, in_threads
    check_strategy("my.module:Mine", in_threads, sizes=(1, 2, 3, 4))

or, with one line per law in the output of pytest:

    @parametrize_with_checks("my.module:Mine", sizes=(1, 2, 3))
    def test_mine(check): check()

Each law is a function `check_*` in CHECKS. The traits of a strategy decide which of them apply. A violation raises
StrategyCheckError.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from roundelay import topology
from roundelay.engine.config import EngineConfig
from roundelay.engine.learner import build_strategy
from roundelay.errors import PeerLost
from roundelay.launch.threads import run_threads
from roundelay.strategies.base import Traits
from roundelay.testing.check_jobs import RunSpec, ToyTask, run_one_direction_per_rank, run_toy_task, run_zero_gradient

Runner = Callable[..., list[Any]]
"""run(job, *args, size=n, simulate_nodes=m) -> results by rank. ProcessPool.run is one, run_threads another."""
in_threads: Runner = run_threads

ZERO_GRADIENT_STEPS = 8
LOSS_BELOW = 1.2
"""Of the final model on the toy task. An untrained model has more; a uniform guess has log 3 = 1.1."""


class StrategyCheckError(AssertionError):
    """A strategy violates a law of the conformance suite."""

    def __init__(self, law: str, strategy: str, size: int, problem: str) -> None:
        super().__init__(f"law '{law}' violated by '{strategy}' with {size} rank{'s' * (size > 1)}: {problem}")
        self.law, self.strategy, self.size = law, strategy, size


class Violation(Exception):
    """What a check found; `StrategyCheck` adds law, strategy and size."""


def require(condition: bool | np.bool_, problem: str) -> None:
    """Raise Violation unless the condition holds. Works under `python -O`."""
    if not condition:
        raise Violation(problem)


@dataclass(frozen=True)
class CheckContext:
    """What a check works with: the run, the strategy's traits, and where the ranks run."""

    spec: RunSpec
    traits: Traits
    run: Runner
    size: int
    folder: Path

    def execute(self, job: Any, *args: Any, **changes: Any) -> list[Any]:
        """Run a job on all ranks with some settings changed. Returns the results by rank."""
        return self.run(job, replace(self.spec, **changes), *args, size=self.size, simulate_nodes=self.spec.simulate_nodes)


# ------------------------------------------------------------------------------------------------------------- the laws


def check_single_worker_equals_sgd(c: CheckContext) -> None:
    """One rank gives the bits of `single`."""
    w = c.execute(run_toy_task)[0]["w"]
    single = run_threads(run_toy_task, RunSpec("single"), size=1)[0]["w"]
    require(np.array_equal(w, single), f"one rank differs from 'single' by {np.abs(w - single).max()}")


def check_every_sample_once(c: CheckContext) -> None:
    """Every epoch uses every sample once, even if the batches do not divide it."""
    results = c.execute(run_toy_task, task=ToyTask(samples=37), batch=3, epochs=2.0)
    spans = sorted(span for result in results for span in result["spans"])
    if c.traits.sharding == "static":  # all ranks share the span of a round
        spans = sorted(set(spans))
    require(sum(stop - start for start, stop in spans) == 74, f"2 epochs of 37 samples became the ranges {spans}")
    require(spans[0][0] == 0, f"the first sample is missing in {spans}")
    require(all(a[1] == b[0] for a, b in pairwise(spans)), f"the ranges overlap or have gaps: {spans}")


def check_final_models_equal(c: CheckContext) -> None:
    """All ranks end with the same model, and it has learned something."""
    results = c.execute(run_toy_task)
    for rank, result in enumerate(results):
        difference = np.abs(results[0]["w"] - result["w"]).max()
        require(np.array_equal(results[0]["w"], result["w"]), f"ranks 0 and {rank} differ by {difference}")
    loss = results[0]["metrics"]["loss"]
    require(loss < LOSS_BELOW, f"the final loss must be < {LOSS_BELOW} (got {loss})")


def check_ranks_influence_each_other(c: CheckContext) -> None:
    """The gradients of every rank reach the weights of every other rank during training, before the final average."""
    for rank, sources in enumerate(c.execute(run_one_direction_per_rank)):
        missing = sorted(set(range(c.size)) - set(sources))
        require(not missing, f"the gradients of ranks {missing} never reached the weights of rank {rank}")


def check_deterministic(c: CheckContext) -> None:
    """Two runs with `deterministic_reduce`, and a run in threads, give the same bits."""
    first, second = (c.execute(run_toy_task)[0]["w"] for _ in range(2))
    threads = replace(c, run=run_threads).execute(run_toy_task)[0]["w"]
    require(np.array_equal(first, second), f"two runs differ by {np.abs(first - second).max()}")
    require(np.array_equal(first, threads), f"the backend differs from threads by {np.abs(first - threads).max()}")


def check_zero_gradient_conserves_mean(c: CheckContext) -> None:
    """With a zero gradient the mean is conserved, and the spread shrinks as the mixing matrices say."""
    results = [r for r in c.execute(run_zero_gradient, ZERO_GRADIENT_STEPS) if r["is_node_leader"]]
    before, after = (np.stack([r[key] for r in results]).astype(np.float64) for key in ("start", "end"))
    # averages weighted by samples conserve the weighted mean: a node of two ranks counts twice
    weights = [r["node_size"] if c.traits.sample_weighting == "average" else 1 for r in results]
    means = [np.average(x, axis=0, weights=weights) for x in (before, after)]
    require(np.allclose(means[0], means[1], atol=2e-6), f"the mean moved by {np.abs(means[0] - means[1]).max()}")
    name, size = c.spec.topology, len(results)
    spread = [float(np.square(x - x.mean(0)).mean()) ** 0.5 for x in (before, after)]
    if results[0]["rounds"]:
        require(spread[1] < 0.8 * spread[0], f"the spread shrank from {spread[0]} to {spread[1]} only")
        # between machines two half differences may be under way, so a weight may leave the range for a moment, but not far
        margin = 0.5 * (before.max(0) - before.min(0)) + 1e-5
        inside = (after <= before.max(0) + margin) & (after >= before.min(0) - margin)
        require(bool(inside.all()), "exchanges must not move weights far out of the range of the initial weights")
    elif c.traits.averaging == "neighbors":
        expected = np.linalg.matrix_power(topology.neighbor_matrix(name, size), ZERO_GRADIENT_STEPS) @ before
        require(np.allclose(expected, after, atol=1e-5), f"the weights differ from those after 8 steps of {name}")
    elif size > 1:
        require(spread[1] < 1e-5 * spread[0], f"the spread shrank from {spread[0]} to {spread[1]} only")


def check_resume_is_exact(c: CheckContext) -> None:
    """A resumed run gives the same bits (deterministic strategies), and uses every sample once (all strategies)."""
    # threads share torch's RNG state, so dropout is not reproducible there
    task = ToyTask(dropout=0.0 if c.run is run_threads else 0.2)
    straight = c.execute(run_toy_task, task=task)[0]["w"]
    with tempfile.TemporaryDirectory(dir=c.folder) as folder:
        c.execute(run_toy_task, task=task, run=folder, epochs=1.0)
        resumed = c.execute(run_toy_task, task=task, run=folder, epochs=2.0, resume="auto")
    if c.traits.deterministic:
        w = resumed[0]["w"]
        require(np.array_equal(straight, w), f"the resumed run differs by {np.abs(straight - w).max()}")
    spans = {span for result in resumed for span in result["spans"]}
    samples = sum(stop - start for start, stop in spans if start >= task.samples)
    require(samples == task.samples, f"the second epoch must use {task.samples} samples (got {samples}): {sorted(spans)}")


def check_no_hang_with_stragglers(c: CheckContext) -> None:
    """No run hangs if the first or the last rank is slow, or if a rank never has a batch."""
    for rank in (0, c.size - 1):
        c.execute(run_toy_task, straggler=f"{rank}:20", task=ToyTask(samples=24), epochs=1.0)
    c.execute(run_toy_task, task=ToyTask(samples=3), batch=3, epochs=1.0)


def check_adam_with_clipping(c: CheckContext) -> None:
    """Adam with clipped gradients trains, and all ranks end with the same finite model."""
    results = c.execute(run_toy_task, optimizer="adam", max_grad_norm=1.0, epochs=1.0)
    require(all(np.array_equal(results[0]["w"], r["w"]) for r in results), "the final models differ by rank")
    require(np.isfinite(results[0]["w"]).all(), "the final model is not finite")


@dataclass(frozen=True)
class Law:
    """A check, and the strategies and sizes that it applies to."""

    check: Callable[[CheckContext], None]
    applies: Callable[[Traits, int], bool] = lambda traits, size: True

    @property
    def name(self) -> str:
        return self.check.__name__.removeprefix("check_")


CHECKS: tuple[Law, ...] = (
    Law(check_single_worker_equals_sgd, lambda traits, size: size == 1),
    Law(check_every_sample_once),
    Law(check_final_models_equal),
    Law(check_ranks_influence_each_other, lambda traits, size: size > 1),
    Law(check_deterministic, lambda traits, size: traits.deterministic),
    Law(check_zero_gradient_conserves_mean, lambda traits, size: size > 1 and traits.conserves_mean and traits.contracts),
    Law(check_resume_is_exact),
    Law(check_no_hang_with_stragglers, lambda traits, size: size > 1),
    Law(check_adam_with_clipping),
)


# ------------------------------------------------------------------------------------------------------------- the suite


@dataclass(frozen=True)
class StrategyCheck:
    """One law, to be checked for one strategy with one number of ranks. Call it to check it."""

    law: Law
    spec: RunSpec
    traits: Traits
    size: int

    def __call__(self, run: Runner = in_threads, folder: Path | None = None) -> None:
        """Check the law on a backend. Raises StrategyCheckError if it is violated or the run fails.

        `folder`: where runs that are resumed are saved; by default a temporary folder.
        """
        try:
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                self.law.check(CheckContext(self.spec, self.traits, run, self.size, Path(scratch)))
        except (Violation, PeerLost) as error:
            problem = str(error) if isinstance(error, Violation) else f"the run failed: {error}"
            raise StrategyCheckError(self.law.name.replace("_", " "), self.spec.strategy, self.size, problem) from error

    def __str__(self) -> str:
        return f"{self.law.name}/{self.size}"


def strategy_checks(name: str, sizes: Sequence[int] = (1, 2, 3, 4), **options: Any) -> list[StrategyCheck]:
    """Return the checks that apply to a strategy with these options, for each number of ranks."""
    traits = build_strategy(EngineConfig(strategy=name, strategy_options=options)).traits
    checks = []
    for size in sizes:
        if size > 1 and traits.averaging == "none":
            continue
        nodes = 2 if traits.hierarchical and size > 2 else 0
        spec = RunSpec(name, tuple(sorted(options.items())), simulate_nodes=nodes)
        checks += [StrategyCheck(law, spec, traits, size) for law in CHECKS if law.applies(traits, size)]
    return checks


def check_strategy(
    name: str, run: Runner, sizes: Sequence[int] = (1, 2, 3, 4), folder: Path | None = None, **options: Any
) -> list[str]:
    """Check all laws that a strategy promises to keep. Returns their names, as law/size. Raises StrategyCheckError.

    `name`: as in strategy=NAME; `options`: its strategy_options. `run`: where the ranks run, for example `in_threads`.
    `sizes`: the numbers of ranks. `folder`: where runs that are resumed are saved, visible to all ranks.
    """
    checks = strategy_checks(name, sizes, **options)
    for check in checks:
        check(run, folder)
    return [str(check) for check in checks]


def parametrize_with_checks(name: str, sizes: Sequence[int] = (1, 2, 3, 4), **options: Any) -> Any:
    """Return a pytest decorator that runs a test once per check of a strategy. The test's argument is named `check`."""
    import pytest

    return pytest.mark.parametrize("check", strategy_checks(name, sizes, **options), ids=str)
