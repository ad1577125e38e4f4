"""Replay: an asynchronous run done again in its recorded order, in one thread, to the same weights.

What timing decided is in the record (replay/reader.py); everything else is a function of the settings. So the strategy, the
optimizer and the task run as they ran then, each learner as a greenlet, and wait for their turn on every published vector
(replay/scheduler.py). On a CPU, with the same build of torch and the same number of threads, the weights come out bit for bit; sums
over a machine's learners that gloo made in its own order come out within rounding.
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
from roundelay.engine.config import EngineConfig
from roundelay.engine.learner import build_strategy
from roundelay.engine.trainer import RunConfig, make_optimizer
from roundelay.errors import DataError, UsageError
from roundelay.optim.adapter import OptimizerAdapter
from roundelay.optim.lr_schedule import lr_schedule
from roundelay.replay.reader import RunLog, StepRecord, read_run_log
from roundelay.replay.scheduler import ReplayCommunicator, ReplayGroup, ReplayScheduler
from roundelay.strategies.base import innermost
from roundelay.strategies.step import StepInfo
from roundelay.strategies.worker import Worker
from roundelay.topology.resolver import SeededTopologies


def check_settings(record: RunLog, settings: dict[str, Any], where: str) -> None:
    """The run's settings must be those the record was made with."""
    said: dict[str, Any] = record.card["settings"]
    for key in sorted(set(said) | set(settings)):
        if said.get(key) != settings.get(key):
            raise DataError(
                f"the record was made with {key} = {said.get(key)!r}, the settings say {settings.get(key)!r}",
                where=where,
                hint="replay with the settings the run was recorded with",
            )


class Replay:
    """A recorded run, ready to be done again."""

    def __init__(self, task: Task, options: EngineConfig, plan: RunConfig, record: RunLog) -> None:
        self.task, self.options, self.plan, self.record = task, options, plan, record
        card = record.card
        if card["device"] != "cpu":
            raise UsageError("only runs on the CPU can be replayed", where=f"device {card['device']}", hint="record on cpu")
        if task.samples != card["samples"]:
            raise DataError(
                f"the record is of a task with {card['samples']} samples, this one has {task.samples}",
                where="task",
                hint="replay with the same data",
            )
        self.last: dict[int, Tensor] = {}
        self._first: Tensor | None = None

    def play(self, watch: Callable[[int, Worker], None] | None = None, done: Callable[[int], None] = lambda n: None) -> None:
        """Does it again. `watch(rank, worker)` is called after every step, `done(events)` after every event."""
        threads = torch.get_num_threads()
        random = torch.get_rng_state()
        torch.set_num_threads(self.record.card["threads"])
        try:
            self._play(watch, done)
        finally:
            torch.set_num_threads(threads)
            torch.set_rng_state(random)

    def _play(self, watch: Callable[[int, Worker], None] | None, done: Callable[[int], None]) -> None:
        card = self.record.card
        size, leaders, machines = card["size"], card["leaders"], card["machines"]
        stage = ReplayScheduler(self.record.orders, done)
        outer = ReplayGroup(stage, len(leaders))
        nodes: dict[int, ReplayGroup] = {}
        parts: list[Callable[[], None]] = []
        for rank in range(size):
            machine = [rank]
            if len(leaders) < size:
                machine = [r for r in range(size) if machines[r] == machines[rank]]
            node = None
            if len(machine) > 1:
                circle = nodes.setdefault(machine[0], ReplayGroup(stage, len(machine)))
                node = ReplayCommunicator(circle, machine.index(rank))
            comm = ReplayCommunicator(outer, leaders.index(rank)) if rank in leaders else node
            assert comm is not None
            parts.append(self._learner(rank, comm, node, watch))
        stage.play(parts)

    def _learner(
        self, rank: int, comm: ReplayCommunicator, node: ReplayCommunicator | None, watch: Callable[[int, Worker], None] | None
    ) -> Callable[[], None]:
        """One learner from its first weights to what it brings to the closing average, as train.learner has it."""
        options, plan, card, task = self.options, self.plan, self.record.card, self.task
        strategy = build_strategy(options)
        torch.manual_seed(options.seed)
        module = task.build()
        torch.manual_seed(options.seed * 1_000_003 + rank)
        random = [torch.get_rng_state()]
        flat = Flat(module)
        if flat.phi.numel() != card["parameters"]:
            raise DataError(
                f"the record is of a model with {card['parameters']} parameters, this one has {flat.phi.numel()}",
                where="task",
                hint="replay with the same task",
            )
        if self._first is None:
            self._first = flat.phi.clone()
        flat.phi.copy_(self._first)
        optimizer = OptimizerAdapter(flat, make_optimizer(plan, module), options.max_grad_norm)
        if options.schedule != "constant" or options.warmup_epochs > 0:
            optimizer.factor = lr_schedule(
                options.schedule, card["samples"], card["total"], options.warmup_epochs, options.anneal_after_epochs
            )

        def compute(piece: StepRecord) -> Callable[[], float]:
            def run() -> float:
                torch.set_rng_state(random[0])
                loss = task.loss(module, task.batch(piece.epoch, piece.start, piece.stop))
                loss.backward()
                random[0] = torch.get_rng_state()
                return float(loss.detach())

            return run if piece.stop > piece.start else lambda: float("nan")

        def live() -> None:
            worker = Worker(
                cast(Communicator, comm),
                flat,
                optimizer,
                SeededTopologies(options.seed),
                lambda: 0.0,
                shares_weights=strategy.traits.shares_weights and rank in card["leaders"],
                deterministic_reduce=options.deterministic_reduce,
                weight_gradients=strategy.traits.sample_weighting == "gradient",
                steps_per_exchange=options.steps_per_exchange,
                node=cast(Communicator, node) if node is not None else None,
            )
            strategy.start(worker)
            for piece in self.record.steps[rank]:
                optimizer.set_position(piece.step_info.position)
                worker.begin(copy.copy(piece.step_info), compute(piece))
                strategy.step(worker)
                worker.end()
                if watch is not None:
                    watch(rank, worker)
            finish = getattr(innermost(strategy), "finish", None)
            if finish is not None and worker.is_node_leader:
                if strategy.traits.sharding == "dynamic":
                    worker.step_info = StepInfo(0, 0, sum(card["batches"]), card["total"], card["total"])
                finish(worker)
            if worker.is_node_leader:
                self.last[card["leaders"].index(rank)] = worker.last()
            worker.close()

        return live

    # -- what came of it -------------------------------------------------------------------------------------------

    def compare(self, run: Path) -> dict[str, Any]:
        """The weights of the replay beside those of the run: every learner's last ones, and the average model."""
        learners = []
        for vector, was in enumerate(self.record.last):
            now = self.last[vector]
            learners.append({"equal": torch.equal(now, was), "difference": float((now.double() - was.double()).abs().max())})
        mean = self._mean()
        found: dict[str, Any] = {
            "run": str(run),
            "learners": self.record.card["size"],
            "steps": sum(map(len, self.record.steps)),
            "events": self.record.events,
            "equal": all(row["equal"] for row in learners),
            "largest_difference": max(row["difference"] for row in learners),
            "largest_weight": float(mean.abs().max()),
            "by_learner": learners,
        }
        if (run / "model.safetensors").exists():
            found["average_difference"] = float((mean.double() - _saved_model(run, self._slots()).double()).abs().max())
        return found

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
        raise DataError(f"the run's model cannot be read: {error}", where=str(run / "model.safetensors")) from error


def replay(
    run: Path, task: Task, options: EngineConfig, plan: RunConfig, settings: dict[str, Any], done: Callable[[int, int], None]
) -> dict[str, Any]:
    """Reads the record of a run, does it again and compares; `done(events, of)` hears how far it is."""
    record = read_run_log(run)
    check_settings(record, settings, str(run / "config.toml"))
    again = Replay(task, options, plan, record)
    again.play(done=lambda events: done(events, record.events))
    return again.compare(run)
