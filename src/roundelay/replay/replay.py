"""Repeat an asynchronous run in its recorded order, in one thread, to the same weights.

The log (replay/reader.py) holds what depended on timing; everything else is a function of the settings. The strategy, the
optimizer and the task run as in the original run, each learner as a greenlet that waits for its turn on every shared vector
(replay/scheduler.py). On a CPU, with the same torch build and number of threads, the weights are equal to the bit. Sums
inside a machine that gloo computed in its own order are equal within rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from roundelay.core import kernels
from roundelay.core.contracts import Communicator, Task
from roundelay.core.flat import Flat
from roundelay.engine.config import TrainConfig
from roundelay.engine.learner import build_strategy
from roundelay.engine.optimizer import make_optimizer
from roundelay.errors import DataError, UsageError
from roundelay.optim.adapter import OptimizerAdapter
from roundelay.optim.lr_schedule import lr_schedule
from roundelay.replay.reader import RunLog, StepRecord, read_run_log
from roundelay.replay.scheduler import ReplayCommunicator, ReplayGroup, ReplayScheduler
from roundelay.strategies.base import innermost
from roundelay.strategies.step import StepInfo
from roundelay.strategies.worker import Worker
from roundelay.topology.resolver import SeededTopologies


def check_settings(log: RunLog, settings: dict[str, Any], where: str) -> None:
    """Raise DataError if `settings` differ from those of the recorded run."""
    recorded: dict[str, Any] = log.card["settings"]
    for key in sorted(set(recorded) | set(settings)):
        if recorded.get(key) != settings.get(key):
            raise DataError(
                f"{key} must be {recorded.get(key)!r} as in the recorded run (got {settings.get(key)!r})",
                where=where,
                hint="replay with the settings of the recorded run",
            )


class Replay:
    """A recorded run that can be repeated."""

    def __init__(self, task: Task, config: TrainConfig, log: RunLog) -> None:
        self.task, self.config, self.log = task, config, log
        card = log.card
        if card["device"] != "cpu":
            raise UsageError(
                "only runs on the CPU can be replayed", where=f"device {card['device']}", hint="record with device=cpu"
            )
        if task.samples != card["samples"]:
            raise DataError(
                f"the task must have {card['samples']} samples as in the recorded run (got {task.samples})",
                where="task",
                hint="replay with the same data",
            )
        self.last: dict[int, Tensor] = {}
        self._first: Tensor | None = None

    def run(self, on_step: Callable[[int, Worker], None] | None = None, done: Callable[[int], None] = lambda n: None) -> None:
        """Repeat the run. `on_step(rank, worker)` is called after every step, `done(count)` after every operation."""
        threads = torch.get_num_threads()
        rng_state = torch.get_rng_state()
        torch.set_num_threads(self.log.card["threads"])
        try:
            self._run(on_step, done)
        finally:
            torch.set_num_threads(threads)
            torch.set_rng_state(rng_state)

    def _run(self, on_step: Callable[[int, Worker], None] | None, done: Callable[[int], None]) -> None:
        card = self.log.card
        size, leaders, machines = card["size"], card["leaders"], card["machines"]
        scheduler = ReplayScheduler(self.log.orders, done)
        outer = ReplayGroup(scheduler, len(leaders))
        nodes: dict[int, ReplayGroup] = {}
        learners: list[Callable[[], None]] = []
        for rank in range(size):
            machine = [rank]
            if len(leaders) < size:
                machine = [r for r in range(size) if machines[r] == machines[rank]]
            node = None
            if len(machine) > 1:
                group = nodes.setdefault(machine[0], ReplayGroup(scheduler, len(machine)))
                node = ReplayCommunicator(group, machine.index(rank))
            comm = ReplayCommunicator(outer, leaders.index(rank)) if rank in leaders else node
            assert comm is not None
            learners.append(self._learner(rank, comm, node, on_step))
        scheduler.run(learners)

    def _learner(
        self,
        rank: int,
        comm: ReplayCommunicator,
        node: ReplayCommunicator | None,
        on_step: Callable[[int, Worker], None] | None,
    ) -> Callable[[], None]:
        """Return the body of one learner, from its first weights to the final average, as in engine.learner."""
        config, card, task = self.config, self.log.card, self.task
        strategy = build_strategy(config)
        torch.manual_seed(config.seed)
        module = task.build()
        torch.manual_seed(config.seed * 1_000_003 + rank)
        rng_state = [torch.get_rng_state()]
        flat = Flat(module)
        if flat.phi.numel() != card["parameters"]:
            raise DataError(
                f"the model must have {card['parameters']} parameters as in the recorded run (got {flat.phi.numel()})",
                where="task",
                hint="replay with the same task",
            )
        if self._first is None:
            self._first = flat.phi.clone()
        flat.phi.copy_(self._first)
        optimizer = OptimizerAdapter(flat, make_optimizer(config, module), config.max_grad_norm)
        if config.schedule != "constant" or config.warmup_epochs > 0:
            optimizer.factor = lr_schedule(
                config.schedule, card["samples"], card["total"], config.warmup_epochs, config.anneal_after_epochs
            )

        def compute(step: StepRecord) -> Callable[[], float]:
            def run() -> float:
                torch.set_rng_state(rng_state[0])
                loss = task.loss(module, task.batch(step.epoch, step.start, step.stop))
                loss.backward()
                rng_state[0] = torch.get_rng_state()
                return float(loss.detach())

            return run if step.stop > step.start else lambda: float("nan")

        def body() -> None:
            worker = Worker(
                cast(Communicator, comm),
                flat,
                optimizer,
                SeededTopologies(config.seed),
                lambda: 0.0,
                shares_weights=strategy.traits.shares_weights and rank in card["leaders"],
                deterministic_reduce=config.deterministic_reduce,
                weight_gradients=strategy.traits.sample_weighting == "gradient",
                steps_per_exchange=config.steps_per_exchange,
                node=cast(Communicator, node) if node is not None else None,
            )
            strategy.start(worker)
            for step in self.log.steps[rank]:
                optimizer.set_position(step.step_info.position)
                worker.begin(copy.copy(step.step_info), compute(step))
                strategy.step(worker)
                worker.end()
                if on_step is not None:
                    on_step(rank, worker)
            finish = getattr(innermost(strategy), "finish", None)
            if finish is not None and worker.is_node_leader:
                if strategy.traits.sharding == "dynamic":
                    worker.step_info = StepInfo(0, 0, sum(card["batches"]), card["total"], card["total"])
                finish(worker)
            if worker.is_node_leader:
                self.last[card["leaders"].index(rank)] = worker.last()
            worker.close()

        return body

    # -- comparison ------------------------------------------------------------------------------------------------

    def compare(self, run: Path) -> dict[str, Any]:
        """Compare the weights with those of the run: the last ones of every learner, and the average model."""
        learners = []
        for vector, recorded in enumerate(self.log.last):
            replayed = self.last[vector]
            difference = float((replayed.double() - recorded.double()).abs().max())
            learners.append({"equal": torch.equal(replayed, recorded), "difference": difference})
        mean = self._mean()
        comparison: dict[str, Any] = {
            "run": str(run),
            "learners": self.log.card["size"],
            "steps": sum(map(len, self.log.steps)),
            "events": self.log.events,
            "equal": all(row["equal"] for row in learners),
            "largest_difference": max(row["difference"] for row in learners),
            "largest_weight": float(mean.abs().max()),
            "by_learner": learners,
        }
        if (run / "model.safetensors").exists():
            comparison["average_difference"] = float((mean.double() - _saved_model(run, self._slots()).double()).abs().max())
        return comparison

    def _mean(self) -> Tensor:
        rows = torch.stack([self.last[v] for v in range(len(self.last))])
        out = torch.empty_like(rows[0])
        kernels.ordered_sum(out, rows, torch.ones(len(rows), dtype=rows.dtype))
        return out.div_(len(rows))

    def _slots(self) -> list[str]:
        return [slot.name for slot in Flat(self.task.build()).slots]


def _saved_model(run: Path, names: list[str]) -> Tensor:
    try:
        tensors = load_file(str(run / "model.safetensors"))
        return torch.cat([tensors[name].reshape(-1) for name in names])
    except (OSError, KeyError, SafetensorError) as error:
        raise DataError(f"the model of the run cannot be read: {error}", where=str(run / "model.safetensors")) from error


def replay(
    run: Path, task: Task, config: TrainConfig, settings: dict[str, Any], done: Callable[[int, int], None]
) -> dict[str, Any]:
    """Repeat a recorded run and compare the weights. `done(count, total)` reports progress in operations."""
    log = read_run_log(run)
    check_settings(log, settings, str(run / "config.toml"))
    again = Replay(task, config, log)
    again.run(done=lambda events: done(events, log.events))
    return again.compare(run)
