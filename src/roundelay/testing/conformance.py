"""The battery: laws that every strategy keeps on every backend. Also for strategies out of the tree:

    from roundelay.testing.conformance import check_strategy, in_threads
    check_strategy("my.module:Mine", in_threads, sizes=(1, 2, 3, 4), folder=tmp)

Each law is one function; a strategy's traits say which of them it has promised.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from roundelay import topology
from roundelay.data.epoch_order import epoch_order
from roundelay.engine.config import EngineConfig
from roundelay.engine.learner import Learner, build_strategy
from roundelay.engine.trainer import RunConfig, Trainer
from roundelay.launch.context import DistributedContext
from roundelay.launch.threads import run_threads
from roundelay.strategies.worker import StepInfo

Runner = Callable[..., list[Any]]
"""run(job, *args, size=n, machines=m) -> results by rank; Pool.run is one, run_threads another."""
in_threads: Runner = run_threads


@dataclass(frozen=True)
class ToyTask:
    """A small classification task that every strategy can learn."""

    samples: int = 96
    seed: int = 0
    dropout: float = 0.0

    def _data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(17)
        x = torch.randn(self.samples, 6, generator=generator)
        return x, (x @ torch.randn(6, 3, generator=generator)).argmax(1)

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(8, 3))

    def batch(self, epoch: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        x, y = self._data()
        places = torch.from_numpy(epoch_order(self.seed, epoch, self.samples)[start:stop])
        return x[places], y[places]

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(module(batch[0]), batch[1])

    def evaluate(self, module: nn.Module, part: int, parts: int) -> dict[str, tuple[float, float]]:
        x, y = (t[part::parts] for t in self._data())
        return {"loss": (float(nn.functional.cross_entropy(module(x), y, reduction="sum")), float(len(y)))}


@dataclass(frozen=True)
class RunSpec:
    """One run of a lesson."""

    strategy: str
    strategy_options: tuple[tuple[str, Any], ...] = ()
    topology: str = "ring"
    lesson: ToyTask = ToyTask()
    batch: int = 4
    epochs: float = 2.0
    momentum: float = 0.9
    optimizer: str = "sgd"
    max_grad_norm: float = 0.0
    straggler: str = ""
    deterministic_reduce: bool = True
    simulate_nodes: int = 0
    run: str = ""
    resume: str = "no"
    seed: int = 0

    def options(self) -> EngineConfig:
        return EngineConfig(
            strategy=self.strategy,
            strategy_options=dict(self.strategy_options),
            topology=self.topology,
            straggler=self.straggler,
            deterministic_reduce=self.deterministic_reduce,
            max_grad_norm=self.max_grad_norm,
            seed=self.seed,
            timeout_s=30.0,
        )

    def plan(self) -> RunConfig:
        return RunConfig(
            epochs=self.epochs,
            batch=self.batch,
            lr=0.05,
            momentum=self.momentum,
            optimizer=self.optimizer,
            run=Path(self.run) if self.run else None,
            resume=self.resume,
            progress="none",
        )


def run_toy_task(context: DistributedContext, case: RunSpec) -> dict[str, Any]:
    """Trains a case; returns what the laws look at."""
    seen: list[tuple[int, int]] = []
    plan = case.plan()

    def look(learner: Learner) -> None:
        seen.append(learner.completed[-1] if learner.completed else (0, 0))

    run = Trainer(case.lesson, context, case.options(), RunConfig(**{**plan.__dict__, "on_step": look}))
    result = run.go()
    leads = context.rank in context.node_leaders or "hierarchical" not in case.strategy
    return {
        "w": run.learner.flat.phi.clone().numpy(),  # also of a learner that never had a batch
        "spans": seen if leads else [],
        "steps": result.get("steps", 0),
        "metrics": result.get("metrics"),
    }


def run_zero_gradient(context: DistributedContext, case: RunSpec, steps: int) -> dict[str, Any]:
    """Learners that start apart and have a zero gradient: only the communication acts."""
    module = nn.Linear(5, 4)
    learner = Learner(context, module, torch.optim.SGD(module.parameters(), lr=0.1), case.options())
    generator = torch.Generator().manual_seed(100 + context.rank)
    start = torch.randn(learner.flat.phi.numel(), generator=generator)
    learner.worker.assign_(start)
    learner.start()

    def compute() -> float:
        for p in module.parameters():
            p.grad = torch.zeros_like(p)
        return 0.0

    machine = len(learner.machine)
    for k in range(steps):
        learner.run_step(StepInfo(1, machine, context.size, k * context.size, steps * context.size), compute)
    finish = getattr(learner.strategy, "finish", None)
    if finish is not None:
        finish(learner.worker)
    rounds = 0
    if learner.worker.gossip_handle is not None:
        learner.worker.gossip_handle.finish()
        rounds = learner.worker.gossip_handle.rounds
    end = learner.worker.w.clone()
    context.comm.all_reduce_mean(torch.zeros(1)).wait() if context.size > 1 else None
    learner.close()
    return {
        "start": start.numpy(),
        "end": end.numpy(),
        "rounds": rounds,
        "leads": learner.worker.is_node_leader,
        "weight": machine,
    }


def check_strategy(
    name: str, run: Runner, sizes: Sequence[int] = (1, 2, 3, 4), folder: Path | None = None, **options: Any
) -> list[str]:
    """Puts a strategy through the laws it has promised to keep; returns the names of those that were checked."""
    settings = tuple(sorted(options.items()))
    traits = build_strategy(EngineConfig(strategy=name, strategy_options=options)).traits
    checked: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(folder or scratch)
        for size in sizes:
            if name == "single" and size > 1:
                continue
            case = RunSpec(name, settings, simulate_nodes=2 if "hierarchical" in name and size > 2 else 0)
            for law in CHECKS:
                if law(case, traits, run, size, base):
                    checked.append(f"{law.__name__}/{size}")
    return checked


def _go(run: Runner, job: Any, case: RunSpec, *args: Any, size: int) -> list[Any]:
    return run(job, case, *args, size=size, simulate_nodes=case.simulate_nodes)


def check_single_worker_equals_sgd(case: RunSpec, traits: Any, run: Runner, size: int, base: Path) -> bool:
    """One worker equals `single`, bit for bit."""
    if size != 1:
        return False
    mine = _go(run, run_toy_task, case, size=1)[0]["w"]
    single = run_threads(run_toy_task, RunSpec("single"), size=1)[0]["w"]
    assert np.array_equal(mine, single), f"{case.strategy} alone differs from single by {np.abs(mine - single).max()}"
    return True


def check_every_sample_once(case: RunSpec, traits: Any, run: Runner, size: int, base: Path) -> bool:
    """Every epoch deals every sample once, also where the batches do not come out even."""
    odd = RunSpec(**{**case.__dict__, "lesson": ToyTask(samples=37), "batch": 3, "epochs": 2.0})
    spans = [span for result in _go(run, run_toy_task, odd, size=size) for span in result["spans"]]
    if traits.sharding == "static":  # dealt in turn, a span is a round that all of them share
        spans = sorted(set(spans))
    assert sum(stop - start for start, stop in spans) == 74, spans
    assert sorted(spans)[0][0] == 0, spans
    assert all(a[1] == b[0] for a, b in zip(sorted(spans), sorted(spans)[1:], strict=False)), sorted(spans)
    return True


def check_final_models_equal(case: RunSpec, traits: Any, run: Runner, size: int, base: Path) -> bool:
    """The final model is the average of all, and all have it."""
    results = _go(run, run_toy_task, case, size=size)
    for result in results[1:]:
        assert np.array_equal(results[0]["w"], result["w"])
    assert results[0]["metrics"]["loss"] < 1.2, results[0]["metrics"]  # it has learnt something: log 3 = 1.1 by guessing
    return True


def check_deterministic(case: RunSpec, traits: Any, run: Runner, size: int, base: Path) -> bool:
    """Deterministic strategies: two runs with `exact`, and a run in threads, give the same bits."""
    if not traits.deterministic:
        return False
    first, second = (_go(run, run_toy_task, case, size=size)[0]["w"] for _ in range(2))
    threads = run_threads(run_toy_task, case, size=size, simulate_nodes=case.simulate_nodes)[0]["w"]
    assert np.array_equal(first, second), "two runs differ"
    assert np.array_equal(first, threads), f"the backend differs from threads by {np.abs(first - threads).max()}"
    return True


def check_zero_gradient_conserves_mean(case: RunSpec, traits: Any, run: Runner, size: int, base: Path) -> bool:
    """With a zero gradient the mean is conserved and the spread falls at the rate of the matrices that ran."""
    if size == 1 or not (traits.conserves_mean and traits.contracts):
        return False
    if "bmuf" in case.strategy:  # block momentum needs a common start; without it only the average is left
        case = RunSpec(**{**case.__dict__, "strategy_options": (*case.strategy_options, ("eta", 0.0), ("K", 2))})
    results = [r for r in _go(run, run_zero_gradient, case, 8, size=size) if r["leads"]]
    before, after = (np.stack([r[key] for r in results]).astype(np.float64) for key in ("start", "end"))
    # averages that weigh by samples conserve the weighted mean: a machine of two counts twice
    weights = [r["weight"] if traits.sample_weighting == "average" else 1 for r in results]
    means = [np.average(x, axis=0, weights=weights) for x in (before, after)]
    assert np.allclose(means[0], means[1], atol=2e-6), "the mean has moved"
    spread = [float(np.square(x - x.mean(0)).mean()) ** 0.5 for x in (before, after)]
    rounds = results[0]["rounds"]
    if rounds:
        expected = before
        for r in range(rounds):
            expected = topology.mixing_matrix(topology.matching(case.topology, r, len(results), case.seed)) @ expected
        assert np.allclose(expected, after, atol=1e-5), f"not what {rounds} rounds of {case.topology} give"
        assert all(r["rounds"] == rounds for r in results), "agents have played different numbers of rounds"
    elif "dpsgd" in case.strategy:
        mixed = np.linalg.matrix_power(topology.neighbour_matrix("ring", len(results)), 8) @ before
        assert np.allclose(mixed, after, atol=1e-5)
    elif len(results) > 1:
        assert spread[1] < 1e-5 * spread[0], spread
    return True


def check_resume_is_exact(case: RunSpec, traits: Any, run: Runner, size: int, base: Path) -> bool:
    """Stop, save, resume: the same bits for deterministic strategies, every sample once for all."""
    with tempfile.TemporaryDirectory(dir=base) as folder:
        # threads share torch's random state, so there dropout cannot be repeated
        whole = RunSpec(**{**case.__dict__, "lesson": ToyTask(dropout=0.0 if run is run_threads else 0.2)})
        straight = _go(run, run_toy_task, whole, size=size)[0]["w"]
        half = RunSpec(**{**whole.__dict__, "run": folder, "epochs": 1.0})
        _go(run, run_toy_task, half, size=size)
        rest = _go(run, run_toy_task, RunSpec(**{**half.__dict__, "epochs": 2.0, "resume": "auto"}), size=size)
    if traits.deterministic:
        assert np.array_equal(straight, rest[0]["w"]), f"resumed run differs by {np.abs(straight - rest[0]['w']).max()}"
    spans = {span for result in rest for span in result["spans"]}
    assert sum(stop - start for start, stop in spans if start >= 96) == 96, spans
    return True


def check_no_hang_with_stragglers(case: RunSpec, traits: Any, run: Runner, size: int, base: Path) -> bool:
    """No pattern of slow learners hangs: the first, the last, and one that never has a batch."""
    if size == 1:
        return False
    for slow in ("0:20", f"{size - 1}:20"):
        _go(
            run,
            run_toy_task,
            RunSpec(**{**case.__dict__, "straggler": slow, "lesson": ToyTask(samples=24), "epochs": 1.0}),
            size=size,
        )
    _go(run, run_toy_task, RunSpec(**{**case.__dict__, "lesson": ToyTask(samples=3), "batch": 3, "epochs": 1.0}), size=size)
    return True


def check_adam_with_clipping(case: RunSpec, traits: Any, run: Runner, size: int, base: Path) -> bool:
    """Adam with clipping trains too, and ends the same for everybody."""
    results = _go(run, run_toy_task, RunSpec(**{**case.__dict__, "optimizer": "adam", "max_grad_norm": 1.0, "epochs": 1.0}), size=size)
    assert all(np.array_equal(results[0]["w"], r["w"]) for r in results)
    assert np.isfinite(results[0]["w"]).all()
    return True


CHECKS = (
    check_single_worker_equals_sgd,
    check_every_sample_once,
    check_final_models_equal,
    check_deterministic,
    check_zero_gradient_conserves_mean,
    check_resume_is_exact,
    check_no_hang_with_stragglers,
    check_adam_with_clipping,
)
