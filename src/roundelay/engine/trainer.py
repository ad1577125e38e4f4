"""The training loop: step, record, save, judge, stop. It knows workers, strategies and tasks, and no algorithm."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from roundelay.core.contracts import Task
from roundelay.core.interrupts import StopOnSignals
from roundelay.core.update_log import UpdateLog
from roundelay.data.device import DeviceTransfer
from roundelay.data.loader import MAX_DEPTH
from roundelay.data.process import ProcessBatches
from roundelay.engine.checkpoint import Checkpoints, disk_errors_as, latest, model_tensors, read_model
from roundelay.engine.config import EngineConfig
from roundelay.engine.evaluator import Evaluator
from roundelay.engine.learner import Learner, innermost
from roundelay.engine.sharding import BatchLease, DynamicSharding, StaticSharding
from roundelay.errors import DataError, Interrupted, PeerLost, UsageError, did_you_mean
from roundelay.launch.context import DistributedContext
from roundelay.metrics.dashboard import LiveDashboard, RunTitle
from roundelay.metrics.tensorboard import FOLDER, TensorBoardLogger
from roundelay.optim.ngsgd import NGSGD

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "ngsgd": NGSGD,
}

BUILDING = threading.Lock()
"""Learners in threads share torch's random state: one at a time draws its first weights."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What a run does beside stepping."""

    epochs: float = 1.0
    batch: int | str | Sequence[int] = 64
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    run: Path | None = None
    resume: str = "no"
    checkpoint_every_epochs: float = 1.0
    eval_at_checkpoint: bool = True
    keep_checkpoints: int = 3
    progress: str = "auto"
    tensorboard: bool = True
    num_workers: int = 1
    loader_kind: str = "thread"
    about: dict[str, Any] = field(default_factory=dict)
    record_settings: dict[str, Any] | None = None
    """Note the order of events down, so that `roundelay replay` can do them again: what the record is to say of the run."""
    on_step: Callable[[Learner], None] | None = None
    """Called after every step: for benchmarks that look over the learner's shoulder."""


def make_optimizer(plan: RunConfig, module: torch.nn.Module) -> torch.optim.Optimizer:
    if plan.optimizer not in OPTIMIZERS:
        raise UsageError(
            f"there is no optimizer '{plan.optimizer}'", where="optimizer", hint=did_you_mean(plan.optimizer, OPTIMIZERS)
        )
    settings: dict[str, Any] = {"lr": plan.lr, "weight_decay": plan.weight_decay}
    if plan.optimizer in ("sgd", "ngsgd"):
        settings["momentum"] = plan.momentum
    made = OPTIMIZERS[plan.optimizer]((p for p in module.parameters() if p.requires_grad), **settings)
    return made.watch(module) if isinstance(made, NGSGD) else made


def train(task: Task, context: DistributedContext, options: EngineConfig, plan: RunConfig) -> dict[str, Any]:
    """Trains a task at this place of the job; returns the run's metrics."""
    return Trainer(task, context, options, plan).go()


class Trainer:
    """One learner's run."""

    def __init__(self, task: Task, context: DistributedContext, options: EngineConfig, plan: RunConfig) -> None:
        self.task, self.context, self.options, self.plan = task, context, options, plan
        if plan.run is not None:
            (plan.run / "log").mkdir(parents=True, exist_ok=True)
        log = plan.run / "log" / f"rank-{context.rank:03d}.txt" if plan.run is not None else None
        self._log = open(log, "a") if log is not None and context.runtime.owns_terminal(context.rank) else None  # noqa: SIM115
        self.panel = LiveDashboard(plan.progress if context.rank == 0 else "none")
        with BUILDING:
            context.runtime.seed_init(options.seed)
            module = task.build().to(context.device)
            context.runtime.seed_rank(options.seed * 1_000_003 + context.rank)  # dropout and the like differ between learners
        events = context.runtime.events(plan.run / "events.jsonl" if plan.run is not None else None, context.rank)
        self.learner = Learner(context, module, make_optimizer(plan, module), options, events)
        self.evaluator = Evaluator(task, self.learner, self.say)
        self.scribe = TensorBoardLogger(self.learner, plan.run / FOLDER if plan.run is not None and plan.tensorboard else None)
        self.evaluator.on_result = self.scribe.on_evaluation
        self.checkpoints: Checkpoints | None = None
        if plan.run is not None:
            self._check_shared(plan.run)
            about = {"strategy": options.strategy, "seed": options.seed, **plan.about}
            self.checkpoints = Checkpoints(plan.run / "ckpt", self.learner, plan.keep_checkpoints, about)
        self._asked_to_stop = threading.Event()
        self._stopped_early = False
        self.final_figures: dict[str, float] = {}

    def say(self, line: str) -> None:
        """To this rank's log, and to the person who watches (whoever of the learners has news)."""
        if self._log is not None:
            with suppress(OSError):  # a full disk stops the log, not the run
                self._log.write(f"{self.context.runtime.stamp()} {line}\n")
                self._log.flush()
        if self.context.rank == 0:
            self.panel.line(line)

    def _check_shared(self, run: Path) -> None:
        """All ranks must see one run directory: shards of a checkpoint are put together there."""
        store = self.learner.job.store
        if self.context.rank == 0:
            (run / ".token").write_text(store.claim("run-token", str(time.time_ns())))
            store.set("run-token-written", "1")
        while store.get("run-token-written") is None:
            store.pause(0.01, "run-token-written")
        try:
            seen = (run / ".token").read_text()
        except OSError:
            seen = ""
        if seen != store.get("run-token"):
            raise UsageError(
                "this rank does not see the run directory of rank 0",
                where=f"rank {self.context.rank}, run={run}",
                hint="put the run directory on a disk that all machines share",
            )

    # -- the whole -------------------------------------------------------------------------------------------------

    def go(self) -> dict[str, Any]:
        learner, plan = self.learner, self.plan
        try:
            batches = self._batches()
            total = round(plan.epochs * self.task.samples)
            first, missing_ranges = self._resume()
            self._record(first, total, batches)
            self.scribe.start(first)
            learner.start(batches=batches, first=first, total=total, samples=self.task.samples)
            if self.checkpoints is not None:
                self.checkpoints.restore_strategy()
            if first >= total and not missing_ranges:
                self.say(f"nothing left to do: the checkpoint stands at {first} of {total} samples")
            sharding = learner.shard(self.task.samples, total, batches, first, missing_ranges)
            self._greet(batches, first, total)
            with self._signals():
                self._loop(sharding, total)
            if isinstance(sharding, DynamicSharding):
                learner.position = max(learner.position, sharding.total)  # everybody's work is done, not only one's own
                learner.leave()  # before the save: nobody may wait for the checkpoint of one who waits at a rendezvous
            if self._stopped_early or self.checkpoints is not None:
                self._save_and_settle()
            mean = learner.finish().clone()
            if self._stopped_early:
                raise Interrupted(
                    "the run was interrupted; a checkpoint is written" if self.checkpoints else "the run was interrupted",
                    where=f"{learner.position} of {total} samples",
                    hint="start the same command with resume=auto to go on",
                )
            return self._conclude(mean)
        except DataError as error:
            learner.job.store.claim("abort", str(error))
            raise
        except PeerLost as error:
            cause = learner.job.store.get("abort")
            if cause:
                raise PeerLost(
                    f"another learner stopped the run: {cause.splitlines()[0]}",
                    where=f"rank {self.context.rank}",
                    hint="see its message",
                ) from error
            raise
        finally:
            self.panel.close()
            if self._log is not None:
                with suppress(OSError):
                    self._log.close()
            self.scribe.close()
            learner.close()

    def _loop(self, sharding: StaticSharding | DynamicSharding, total: int) -> None:
        learner, plan, task = self.learner, self.plan, self.task
        every = max(1, round(plan.checkpoint_every_epochs * task.samples))
        next_save = (learner.position // every + 1) * every
        carrier = DeviceTransfer(self.context.device)
        loader = self.context.runtime.prefetch(
            self._halting(sharding), self._preparing(carrier), lambda c: c.step_info.local_samples, plan.num_workers
        )
        with closing(iter(loader)) as feed:
            while True:
                with learner.worker.timer("data"):
                    item = next(feed, None)
                    learner.worker.step_timer.seconds["loader"] += loader.last_s
                if item is None:
                    return
                claim, batch = item[0], carrier.take(item[1])
                if claim.step_info.position >= next_save:
                    # race: others' work has crossed the line
                    next_save = self._save_at(next_save, every, claim.step_info.position)
                if learner.update_log is not None:
                    step_info = claim.step_info
                    learner.update_log.step(
                        claim.epoch,
                        claim.start,
                        claim.stop,
                        step_info.local_samples,
                        step_info.node_samples,
                        step_info.global_samples,
                        step_info.position,
                    )
                learner.run_step(claim.step_info, self._compute(batch), claim.span)
                if learner.strategy.traits.sharding == "static" and next_save <= claim.span[1] < total:
                    next_save = self._save_at(next_save, every, claim.span[1])
                self._look_after_saves()
                if plan.on_step is not None:
                    plan.on_step(learner)
                self.panel.held_out = self.evaluator.newest
                self.panel.step(learner.position, total)

    def _preparing(self, carrier: DeviceTransfer) -> Callable[[BatchLease], Any]:
        """What loaders do with a claim: the task's batch of it, on its way to the device; nothing for an empty one."""
        if self.plan.loader_kind == "process" and self.plan.num_workers:
            return ProcessBatches(self.task, carrier.send)
        return lambda claim: carrier.send(
            self.task.batch(claim.epoch, claim.start, claim.stop) if claim.step_info.local_samples else None
        )

    def _compute(self, batch: Any) -> Callable[[], float] | None:
        if batch is None:
            return None

        def compute() -> float:
            loss = self.task.loss(self.learner.module, batch)
            loss.backward()
            return float(loss.detach())

        return compute

    def _halting(self, sharding: StaticSharding | DynamicSharding) -> Any:
        """The sharding, until somebody asked the job to stop. Runs in a thread of the loader."""
        learner, store = self.learner, self.learner.job.store
        lead = int(getattr(innermost(learner.strategy), "K", 1))
        reached = sharding.dealt.first
        for number, claim in enumerate(sharding):
            if self._asked_to_stop.is_set():
                if isinstance(sharding, DynamicSharding):
                    sharding.stop()
                elif store.get("stop-step") is None:
                    # nobody is further ahead than one rendezvous and its loader, and everybody looks here before every claim
                    store.claim("stop-step", str(number + lead + MAX_DEPTH + 1))
            if isinstance(sharding, StaticSharding):
                stop = store.get("stop-step")
                if stop is not None:
                    sharding.stop_at = int(stop)
                    if number >= int(stop):
                        self._stopped_early = True
                        return
            reached = claim.span[1]
            yield claim
        # asked to stop, and something was left to do
        self._stopped_early = (sharding.total if isinstance(sharding, DynamicSharding) else reached) < sharding.dealt.total

    # -- saving and judging ----------------------------------------------------------------------------------------

    def _save_at(self, due: int, every: int, position: int) -> int:
        """Writes this learner's shards; returns when the next save is due. Race: one for every line that others have crossed,
        since each of those checkpoints waits for all learners."""
        end = (position // every + 1) * every
        if self.checkpoints is not None:
            race = self.learner.strategy.traits.sharding == "dynamic"
            with self.learner.worker.timer("save"):
                for line in range(due, end, every) if race else [position]:
                    self.checkpoints.save(line)
        return end

    def _look_after_saves(self) -> None:
        self.evaluator.announce()
        if self.checkpoints is None or not (self.checkpoints.waiting or self.checkpoints.complete):
            return
        self.checkpoints.poll()
        while self.checkpoints.complete:
            position = self.checkpoints.complete.pop(0)
            if self.plan.eval_at_checkpoint:
                note = json.loads(self.learner.job.store.get(f"complete/{position}") or "{}")
                path = self.checkpoints.folder / f"samples-{position:012d}"
                try:
                    mean = read_model(path, self.learner)
                except FileNotFoundError:  # the others are `keep` checkpoints ahead and have removed it: it goes unjudged
                    self.say(f"{path.name} was gone before this rank could judge it; keep_checkpoints=… keeps more checkpoints")
                    continue
                self.evaluator.evaluate(position, mean, note.get("spread"))

    def _save_and_settle(self) -> None:
        """The last checkpoint, before the models are averaged: a resumed run goes on as if there had been no end."""
        if self.checkpoints is None:
            return
        learner = self.learner
        race = learner.strategy.traits.sharding == "dynamic"
        position = learner.job.store.claim("last-save", str(learner.position)) if race else str(learner.position)
        self.checkpoints.save(int(position))
        host, store = self.context.runtime, learner.job.store
        deadline = host.clock() + self.options.timeout_s
        # only for this one: an earlier one may lack the shard of a learner whose sharding jumped over it
        self.checkpoints.poll()
        while int(position) in self.checkpoints.waiting and host.clock() < deadline:
            store.pause(0.01, f"complete/{position}", "deaths")
            self.checkpoints.poll()

    def _conclude(self, mean: torch.Tensor) -> dict[str, Any]:
        learner, plan = self.learner, self.plan
        store, size = learner.job.store, self.context.size
        summary = learner.recorder.summary()
        learner.events.write("summary", **summary)
        store.set(f"summary/{self.context.rank}", json.dumps(summary))
        result: dict[str, Any] = {"rank": self.context.rank, "position": learner.position, **summary}
        if plan.eval_at_checkpoint:
            self.evaluator.evaluate(learner.position, mean, None, final=True)
        if self.context.rank == min(learner.job.live_ranks()):
            if plan.run is not None:
                tensors, path = model_tensors(learner, mean, learner.flat.buffer_vector()), plan.run / "model.safetensors"
                with disk_errors_as("the model", f"rank {self.context.rank}, {path}"):
                    save_file(tensors, str(path))
            result |= self._gather_figures(size)
        return result

    def _gather_figures(self, size: int) -> dict[str, Any]:
        """The metrics of the whole run, by the first living rank."""
        store = self.learner.job.store
        found: dict[str, Any] = {}
        clock, membership = self.context.runtime.clock, self.learner.job.membership
        deadline = clock() + self.options.timeout_s
        while self.plan.eval_at_checkpoint and clock() < deadline:
            metrics = store.get("evaluated/final/metrics")
            if metrics is not None:
                found["metrics"] = json.loads(metrics)
                break
            store.pause(0.01, "evaluated/final/metrics")
        self.evaluator.announce()
        ranks: dict[int, Any] = {}
        for r in range(size):
            while (note := store.get(f"summary/{r}")) is None and r not in membership.failed_ranks() and clock() < deadline:
                store.pause(0.005, f"summary/{r}", "deaths")
            if note is not None:
                ranks[r] = json.loads(note)
        found["ranks"] = ranks
        slowest = max(ranks, key=lambda r: ranks[r]["own_s"] / max(ranks[r].get("steps", 1), 1))
        own, waiting = ranks[slowest]["own_s"], ranks[slowest]["waiting_s"]
        found["slowest_rank"] = {"rank": slowest, "own_s": own, "waiting_s": waiting}
        self.learner.events.write("run", slowest_rank=found["slowest_rank"], metrics=found.get("metrics"))
        lost = self.learner.job.membership.failed_ranks()
        if lost:
            found["lost"] = {str(r): why for r, why in lost.items()}
            self.say("lost on the way: " + "; ".join(f"rank {r} ({why})" for r, why in lost.items()))
        if size > 1:
            self.say(f"slowest rank {slowest}: {own:.1f} s of its own, {waiting:.1f} s waiting for others")
        return found

    # -- beginnings ------------------------------------------------------------------------------------------------

    def _resume(self) -> tuple[int, list[tuple[int, int]]]:
        plan = self.plan
        if plan.resume == "no":
            if self.checkpoints is not None and any(self.checkpoints.folder.glob("samples-*")):
                raise UsageError(
                    "the run directory already holds checkpoints",
                    where=f"run={plan.run}",
                    hint="set resume=auto to go on from the newest, or choose another run=…",
                )
            return 0, []
        if self.checkpoints is None:
            raise UsageError("resume needs a run directory", where="run", hint="set run=DIR")
        if plan.resume == "auto":
            path = latest(self.checkpoints.folder, self.say)
            if path is None:
                self.say("no checkpoint yet: starting from the beginning")
                return 0, []
        else:
            path = Path(plan.resume)
        first, missing_ranges = self.checkpoints.restore(path)
        self.say(f"resuming from {path.name}: {first} samples are done")
        return first, missing_ranges

    def _record(self, first: int, total: int, batches: list[int]) -> None:
        plan, context = self.plan, self.context
        if plan.record_settings is None:
            return
        if plan.run is None:
            raise UsageError("a record needs a run directory", where="record", hint="set run=DIR")
        if first > 0:
            raise UsageError(
                "a record begins with its run, and this one is resumed",
                where=f"record_order=true, resume={plan.resume}",
                hint="set record_order=false, or start anew with another run=…",
            )
        card = {
            "format": 1,
            "size": context.size,
            "machines": context.machines,
            "leaders": self.learner.node_leaders,
            "device": context.device.type,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "parameters": self.learner.flat.phi.numel(),
            "samples": self.task.samples,
            "total": total,
            "batches": batches,
            "settings": plan.record_settings,
        }
        self.learner.record(UpdateLog(plan.run, context.rank, card))

    def _batches(self) -> list[int]:
        """Every rank's batch size."""
        from roundelay.engine.batch_size import batch_sizes

        return batch_sizes(self.plan.batch, self.context, self.learner, self.task)

    def _greet(self, batches: list[int], first: int, total: int) -> None:
        parameters = self.learner.flat.phi.numel()
        self.say(
            f"{self.options.strategy}: {self.context.size} learner{'s' * (self.context.size > 1)} "
            f"on {len(set(self.context.machines))} machine{'s' * (len(set(self.context.machines)) > 1)}, "
            f"global batch {sum(batches)} ({'+'.join(map(str, batches))}), rate {self.plan.lr:g} for that batch, "
            f"{parameters:,} parameters, samples {first} to {total}"
        )
        title = f"{self.options.strategy}, {self.context.size} learner{'s' * (self.context.size > 1)}"
        frames, seconds = (float(getattr(self.task, name, 0.0)) for name in ("frames_per_sample", "seconds_per_sample"))
        self.panel.start(RunTitle(title, self.task.samples, frames, seconds), self.learner.latest_metrics_of_all_ranks)

    def _signals(self) -> Any:
        if not self.context.runtime.owns_terminal(self.context.rank):
            return nullcontext()
        return StopOnSignals(self._asked_to_stop, self.panel.urgent)
