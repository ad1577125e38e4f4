"""Training loop: step, record, checkpoint, evaluate, stop. It uses workers, strategies and tasks, and no specific algorithm."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from roundelay.core.contracts import Task
from roundelay.core.interrupts import StopOnSignals
from roundelay.core.update_log import UpdateLog
from roundelay.core.wait import store_sleep, wait_until
from roundelay.data.device import DeviceTransfer
from roundelay.data.loader import MAX_DEPTH
from roundelay.data.process import ProcessBatches
from roundelay.engine.background import BackgroundCalls
from roundelay.engine.best import BestCheckpoint
from roundelay.engine.checkpoint import Checkpoints, delete_partial
from roundelay.engine.config import TrainConfig
from roundelay.engine.evaluator import Evaluator
from roundelay.engine.finishing import Finisher
from roundelay.engine.learner import Learner
from roundelay.engine.manifest import folder_name
from roundelay.engine.optimizer import make_optimizer
from roundelay.engine.resume import resume
from roundelay.engine.sharding import BatchLease, DynamicSharding, StaticSharding
from roundelay.engine.shards import read_model
from roundelay.engine.store_watch import StoreWatch
from roundelay.engine.validate import CHECKPOINT_FOLDER, check_shared_directory, validate_run
from roundelay.errors import DataError, Interrupted, PeerLost, RoundelayError, UsageError
from roundelay.fleet.membership import FAILURES
from roundelay.launch.context import DistributedContext
from roundelay.launch.local import STARTED
from roundelay.log.rank_log import close_logger, rank_logger
from roundelay.metrics.dashboard import LiveDashboard, RunTitle
from roundelay.metrics.tensorboard import FOLDER, TensorBoardLogger
from roundelay.strategies.base import innermost

_build_lock = threading.Lock()
"""Held while a model is built: learners in threads share torch's global RNG."""


def train(
    task: Task,
    context: DistributedContext,
    config: TrainConfig,
    *,
    metadata: Mapping[str, Any] | None = None,
    record_settings: dict[str, Any] | None = None,
    on_step: Callable[[Learner], None] | None = None,
    on_start: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Train a task as one rank of a job and return the run's metrics. All ranks of the job must call it."""
    trainer = Trainer(
        task, context, config, metadata=metadata, record_settings=record_settings, on_step=on_step, on_start=on_start
    )
    return trainer.run()


class Trainer:
    """The training run of one rank. All ranks of a job construct one with equal settings and call `run` once.

    Args:
        task: What is trained.
        context: This rank's place in the job.
        config: Settings of the run.
        metadata: Extra entries for the manifests of checkpoints.
        record_settings: Record the order of updates, with these settings as the record's description.
        on_step: Called with the learner after each step, in the training thread.
        on_start: Called once the settings have been accepted by this rank, before the first step.

    Raises:
        UsageError: The settings exclude this run; the run directory is unchanged.
    """

    def __init__(
        self,
        task: Task,
        context: DistributedContext,
        config: TrainConfig,
        *,
        metadata: Mapping[str, Any] | None = None,
        record_settings: dict[str, Any] | None = None,
        on_step: Callable[[Learner], None] | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> None:
        validate_run(config, context.size)
        self.task, self.context, self.config = task, context, config
        self._record_settings, self._on_step, self._on_start = record_settings, on_step, on_start
        run, rank = config.run_dir, context.rank
        if run is not None:
            (run / "log").mkdir(parents=True, exist_ok=True)
        self.dashboard = LiveDashboard(config.progress if rank == 0 else "none")
        log_file = run / "log" / f"rank-{rank:03d}.txt" if run is not None and context.runtime.owns_terminal(rank) else None
        self.log = rank_logger(rank, log_file, self.dashboard.line if rank == 0 else None, context.runtime.stamp)
        with _build_lock:
            context.runtime.seed_init(config.seed)
            module = task.build().to(context.device)
            context.runtime.seed_rank(config.seed * 1_000_003 + rank)  # dropout must differ between ranks
        events = context.runtime.events(run / "events.jsonl" if run is not None else None, rank)
        self.learner = Learner(context, module, make_optimizer(config, module), config, events)
        self.watch = StoreWatch(self.learner.job.store)
        self.background = BackgroundCalls(self.learner.job.store)
        self.evaluator = Evaluator(task, self.learner, self.log.info, self.watch, self.background)
        scalars = run / FOLDER if run is not None and config.tensorboard and importlib.util.find_spec("tensorboard") else None
        self.tensorboard = TensorBoardLogger(self.learner, scalars)
        self.evaluator.on_result = self.tensorboard.on_evaluation
        self.checkpoints: Checkpoints | None = None
        if run is not None:
            self._check_shared(run)
            manifest = {"strategy": config.strategy, "seed": config.seed, **(metadata or {})}
            folder, keep = run / CHECKPOINT_FOLDER, config.keep_checkpoints
            self.checkpoints = Checkpoints(folder, self.learner, keep, manifest, self.watch, self.background)
            best_so_far = BestCheckpoint(run / CHECKPOINT_FOLDER, self.learner, config.best_metric, config.best_goal)
            self.evaluator.on_sum = best_so_far.update
        self._stop_requested = threading.Event()
        self._stopped_early = False

    def _check_shared(self, run: Path) -> None:
        """Raise on all ranks unless all see one run directory, where shards are collected. All ranks must call it.

        Rank 0 also deletes what an earlier process left of an incomplete checkpoint or model, before any rank can write one.
        """
        if self.context.rank == 0:
            for folder in (run, run / CHECKPOINT_FOLDER):
                delete_partial(folder)
        check_shared_directory(run, self.context, self.learner.job, self.config.timeout_s)

    # -- the run ---------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train to the end and return the run's metrics; call it once, on all ranks.

        Raises:
            Interrupted: A signal stopped the run; with a run directory, a checkpoint was written.
            DataError: The data or the numbers are bad; the other ranks stop too.
            PeerLost: Another rank failed and the strategy cannot continue without it.
        """
        error: BaseException | None = None
        try:
            return self._run()
        except BaseException as failure:
            error = failure
            raise
        finally:
            self.dashboard.close()
            close_logger(self.log)
            self.tensorboard.close()
            self.watch.close()
            self.background.close()
            self.learner.close(error)

    def _run(self) -> dict[str, Any]:
        learner = self.learner
        try:
            batches = self._batches()
            total = round(self.config.epochs * self.task.samples)
            first, missing_ranges = self._resume()
            self._start_record(first, total, batches)
            if self._on_start is not None:
                self._on_start()
            self.tensorboard.start(first)
            learner.start(batches=batches, first=first, total=total, samples=self.task.samples)
            learner.job.store.set(f"{STARTED}/{self.context.rank}", "1")
            if self.checkpoints is not None:
                self.checkpoints.restore_strategy()
            if first >= total and not missing_ranges:
                self.log.info(f"no samples left: the checkpoint is at {first} of {total} samples")
            sharding = learner.shard(self.task.samples, total, batches, first, missing_ranges)
            self._announce(batches, first, total)
            with self._signals():
                self._loop(sharding, total)
            if isinstance(sharding, DynamicSharding):
                learner.position = max(learner.position, sharding.total)  # includes the work of the other ranks
                learner.leave()  # before the save: no rank may wait for a shard of a rank that waits in a collective
            if self._stopped_early or self.checkpoints is not None:
                self._save_last_checkpoint()
            self.background.wait()
            learner.watchdog.raise_if_fenced()
            mean = learner.finish().clone()
            learner.watchdog.raise_if_fenced()
            if self._stopped_early:
                raise Interrupted(
                    "the run was interrupted; a checkpoint was written" if self.checkpoints else "the run was interrupted",
                    where=f"{learner.position} of {total} samples",
                    hint="run the same command with resume=auto to continue",
                )
            finisher = Finisher(learner, self.evaluator, self.config.run_dir, self.config.eval_at_checkpoint, self.log)
            return finisher.conclude(mean)
        except DataError as error:
            with suppress(RoundelayError):  # the store may be gone
                learner.job.store.claim("abort", str(error))
            raise
        except PeerLost as error:
            cause = None
            with suppress(RoundelayError):  # the store may be gone
                cause = learner.job.store.get("abort")
            self._report_failure(error)
            if cause:
                raise PeerLost(
                    f"another rank stopped the run: {cause.splitlines()[0]}",
                    where=f"rank {self.context.rank}",
                    hint="see the message of that rank",
                ) from error
            raise
        except Exception as error:
            if not isinstance(error, RoundelayError):
                self._report_failure(error)
            raise

    def _report_failure(self, error: Exception) -> None:
        """Report this rank as failed, so that the ranks of a strategy that survives failures continue without it at once."""
        if self.learner.strategy.traits.survives_failures and self.context.size > 1:
            with suppress(RoundelayError):  # the store may be gone
                text = (str(error) or type(error).__name__).splitlines()[0]
                self.learner.job.membership.report(self.context.rank, f"{type(error).__name__}: {text}")

    def _loop(self, sharding: StaticSharding | DynamicSharding, total: int) -> None:
        learner, config, task = self.learner, self.config, self.task
        every = max(1, round(config.checkpoint_every_epochs * task.samples))
        next_save = (learner.position // every + 1) * every
        transfer = DeviceTransfer(self.context.device)
        loader = self.context.runtime.prefetch(
            self._leases(sharding), self._batch_maker(transfer), lambda lease: lease.step_info.local_samples, config.num_workers
        )
        with closing(iter(loader)) as batches:
            while True:
                with learner.worker.timer("data"):
                    item = next(batches, None)
                    learner.worker.step_timer.seconds["loader"] += loader.last_s
                if item is None:
                    self._poll_checkpoints(now=True)
                    return
                lease, batch = item[0], transfer.take(item[1])
                if isinstance(sharding, DynamicSharding) and not sharding.begin(lease):
                    continue  # another rank has taken it over
                info = lease.step_info
                if info.position >= next_save:  # dynamic sharding: other ranks have passed the position
                    next_save = self._save_at(next_save, every, info.position)
                if learner.update_log is not None:
                    learner.update_log.step(
                        lease.epoch, lease.start, lease.stop,
                        info.local_samples, info.node_samples, info.global_samples, info.position,
                    )  # fmt: skip
                learner.run_step(info, self._compute(batch), lease.span)
                if learner.strategy.traits.sharding == "static" and next_save <= lease.span[1] < total:
                    next_save = self._save_at(next_save, every, lease.span[1])
                self._poll_checkpoints()
                if self._on_step is not None:
                    self._on_step(learner)
                self.dashboard.held_out = self.evaluator.newest
                self.dashboard.step(learner.position, total)

    def _batch_maker(self, transfer: DeviceTransfer) -> Callable[[BatchLease], Any]:
        """Return the function that loaders call: it makes the batch of a lease and starts its copy to the device."""
        if self.config.loader_kind == "process" and self.config.num_workers:
            return ProcessBatches(self.task, transfer.send)
        return lambda lease: transfer.send(
            self.task.batch(lease.epoch, lease.start, lease.stop) if lease.step_info.local_samples else None
        )

    def _compute(self, batch: Any) -> Callable[[], float] | None:
        """Return the closure that computes loss and gradients of a batch, or None for an empty batch."""
        if batch is None:
            return None

        def compute() -> float:
            loss = self.task.loss(self.learner.module, batch)
            loss.backward()
            return float(loss.detach())

        return compute

    def _leases(self, sharding: StaticSharding | DynamicSharding) -> Any:
        """Yield the leases of this rank until a rank requests a stop. Runs in a loader thread."""
        learner, store = self.learner, self.learner.job.store
        steps_ahead = int(getattr(innermost(learner.strategy), "K", 1))
        reached = sharding.plan.first
        for number, lease in enumerate(sharding):
            if self._stop_requested.is_set():
                if isinstance(sharding, DynamicSharding):
                    sharding.stop()
                elif store.get("stop-step") is None:
                    # no rank is further ahead than one collective and its loader, and each rank reads the key before a lease
                    store.claim("stop-step", str(number + steps_ahead + MAX_DEPTH + 1))
            if isinstance(sharding, StaticSharding):
                stop = store.get("stop-step")
                if stop is not None:
                    sharding.stop_at = int(stop)
                    if number >= int(stop):
                        self._stopped_early = True
                        return
            reached = lease.span[1]
            yield lease
        # a stop was requested while samples were left
        self._stopped_early = (sharding.total if isinstance(sharding, DynamicSharding) else reached) < sharding.plan.total

    # -- checkpoints and evaluation --------------------------------------------------------------------------------

    def _save_at(self, due: int, every: int, position: int) -> int:
        """Write this rank's shards of the checkpoints that are due, and return the next position to save at.

        With dynamic sharding that is one shard per position passed, because each checkpoint waits for all ranks.
        """
        end = (position // every + 1) * every
        if self.checkpoints is not None:
            dynamic = self.learner.strategy.traits.sharding == "dynamic"
            with self.learner.worker.timer("save"):
                for save_position in range(due, end, every) if dynamic else [position]:
                    self.checkpoints.save(save_position)
        return end

    def _poll_checkpoints(self, now: bool = False) -> None:
        """Evaluate the checkpoints that have become complete. Without `now` no store call, unless one is complete."""
        self.evaluator.announce(now)
        if self.checkpoints is None or not self.checkpoints.waiting:
            return
        self.checkpoints.poll(now)
        while self.checkpoints.complete:
            position, spread = self.checkpoints.complete.pop(0)
            if self.config.eval_at_checkpoint:
                path = self.checkpoints.folder / folder_name(position)
                try:
                    mean = read_model(path, self.learner)
                except FileNotFoundError:  # faster ranks have pruned it
                    self.log.warning(
                        f"checkpoint {path.name} was deleted before this rank could evaluate it; raise keep_checkpoints=N"
                    )
                    continue
                self.evaluator.evaluate(position, mean, spread)

    def _save_last_checkpoint(self) -> None:
        """Write the last checkpoint before the models are averaged, so that a resumed run continues unchanged."""
        if self.checkpoints is None:
            return
        learner = self.learner
        dynamic = learner.strategy.traits.sharding == "dynamic"
        position = learner.job.store.claim("last-save", str(learner.position)) if dynamic else str(learner.position)
        self.checkpoints.save(int(position))
        checkpoints = self.checkpoints

        def complete() -> bool:
            checkpoints.poll(now=True)
            return int(position) not in checkpoints.waiting

        # wait for this checkpoint only: an earlier one may lack the shard of a rank whose leases skipped it
        if not wait_until(
            complete,
            self.config.timeout_s,
            poll_s=0.1,  # a change of a key ends it at once
            clock=self.context.runtime.clock,
            sleep=store_sleep(learner.job.store, f"complete/{position}", FAILURES),
        ):
            self.log.warning(f"the last checkpoint is not complete after {self.config.timeout_s:.0f} s; the run continues")

    # -- start -----------------------------------------------------------------------------------------------------

    def _resume(self) -> tuple[int, list[tuple[int, int]]]:
        """Restore the checkpoint that `resume` names; return its position and the sample ranges that it lacks. Collective."""
        if self.config.resume == "no" or self.checkpoints is None:
            return 0, []
        return resume(self.config.resume, self.checkpoints, self.config.timeout_s, self.log)

    def _start_record(self, first: int, total: int, batches: list[int]) -> None:
        """Start the update log if the run is to be recorded."""
        run, context = self.config.run_dir, self.context
        if self._record_settings is None:
            return
        if run is None or first > 0:
            raise UsageError(
                "a record needs a run directory and a run that starts at 0",
                where="record_order",
                hint="set run=DIR to a new folder, with resume=no",
            )
        header = {
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
            "settings": self._record_settings,
        }
        self.learner.record(UpdateLog(run, context.rank, header))

    def _batches(self) -> list[int]:
        """Return the batch size of each rank."""
        from roundelay.engine.batch_size import batch_sizes

        return batch_sizes(self.config.batch, self.context, self.learner, self.task)

    def _announce(self, batches: list[int], first: int, total: int) -> None:
        """Log the settings of the run and start the dashboard."""
        size, nodes = self.context.size, len(set(self.context.machines))
        title = f"{self.config.strategy}, {size} learner{'s' * (size > 1)}"
        self.log.info(
            f"{self.config.strategy}: {size} learner{'s' * (size > 1)} on {nodes} machine{'s' * (nodes > 1)}, "
            f"global batch {sum(batches)} ({'+'.join(map(str, batches))}), lr {self.config.lr:g}, "
            f"{self.learner.flat.phi.numel():,} parameters, samples {first} to {total}"
        )
        frames, seconds = (float(getattr(self.task, name, 0.0)) for name in ("frames_per_sample", "seconds_per_sample"))
        self.dashboard.start(RunTitle(title, self.task.samples, frames, seconds), self.learner.latest_metrics_of_all_ranks)

    def _signals(self) -> Any:
        """Return a context manager that turns SIGINT and SIGTERM into a stop request."""
        if not self.context.runtime.owns_terminal(self.context.rank):
            return nullcontext()
        return StopOnSignals(self._stop_requested, self.dashboard.urgent)
