"""Settings of the engine, declared once. Files, the command line and the Python interface all use these dataclasses.

Before a run starts, all ranks compare their settings. Those declared `local` may differ: they describe one machine or process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundelay.core.settings import setting

BACKENDS = ("auto", "shm", "torch", "mpi", "threads")
OPTIMIZERS = ("sgd", "adam", "adamw", "ngsgd")
SCHEDULES = ("constant", "cosine", "sqrt2_decay")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one learner: how it steps, communicates and reports."""

    strategy: str = setting(
        "adpsgd", help="Algorithm: a name (roundelay list strategies), nested as in hierarchical(kstep), or my.module:Class."
    )
    strategy_options: dict[str, Any] = setting(factory=dict, help="Fields of the strategy's class, such as K.")
    topology: str = setting(
        "ring", help="Which ranks exchange (roundelay list topologies); random_ring for 8 learners or more."
    )
    backend: str = setting("auto", choices=BACKENDS, help="Communication backend (roundelay list backends).")
    seed: int = setting(
        0, minimum=0, maximum=10**12, help="Seed of the initial weights, the order of samples and random matchings."
    )
    max_grad_norm: float = setting(
        0.0, minimum=0, help="Clip gradients to this norm; 0 disables clipping. Set it if the loss jumps."
    )
    schedule: str = setting(
        "constant", choices=SCHEDULES, help="Learning-rate schedule; sqrt2_decay starts after anneal_after_epochs."
    )
    warmup_epochs: float = setting(0.0, minimum=0, help="Epochs of linear warm-up. Increase it if large batches diverge early.")
    anneal_after_epochs: float = setting(10.0, minimum=0, help="Epochs before sqrt2_decay starts to lower the rate.")
    deterministic_reduce: bool = setting(False, help="Reduce in rank order: bitwise reproducible, slower.")
    simulate_nodes: int = setting(
        0, minimum=0, help="Divide the local learners into N groups that act as nodes, to test hierarchies; 0 disables it."
    )
    steps_per_exchange: float = setting(
        1.0, minimum=0.01, help="Gradient steps per exchange. Raise it if exchanges take CPU time from training."
    )
    straggler: str = setting("", help="Slow ranks down on purpose: 1:2.0 makes rank 1 take twice its time.")
    timeout_s: float = setting(60.0, minimum=1, help="Seconds before a collective call fails.")
    failure_s: float = setting(
        12.0, minimum=2, maximum=3600, help="Seconds without a heartbeat in the store before a rank is declared failed."
    )
    bind_address: str = setting(
        "127.0.0.1", local=True, help="Address that sockets bind to; auto picks the one that reaches MASTER_ADDR."
    )
    device: str = setting("auto", local=True, help="Device: auto, cpu or cuda.")
    log_every_s: float = setting(1.0, minimum=0.01, help="Seconds between two metric records of a learner.")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(EngineConfig):
    """Settings of a training run: the engine's, and those of the training loop, the launcher and the run directory."""

    task: str = setting(
        "", help="Task to train: importable.module:Class. The file's folder and the current one are searched first."
    )
    task_options: dict[str, Any] = setting(factory=dict, help="Fields of the task's class.")
    learners: int = setting(1, minimum=1, local=True, help="Local processes to start; ignored under torchrun, mpirun and srun.")
    epochs: float = setting(1.0, minimum=0, help="Passes over the training samples, summed over all learners.")
    batch: int | str | Sequence[int] = setting(
        64, minimum=1, help="Samples per learner and step: N, hostA:128,hostB:32 for uneven machines, or auto to measure."
    )
    optimizer: str = setting("sgd", choices=OPTIMIZERS, help="Optimizer; ngsgd is natural gradient, for rare averaging.")
    lr: float = setting(0.1, minimum=0, help="Learning rate of the global batch; it has the same meaning in all strategies.")
    momentum: float = setting(0.9, minimum=0, help="Momentum of sgd and ngsgd.")
    weight_decay: float = setting(0.0, minimum=0, help="Weight decay of the optimizer.")
    num_workers: int = setting(
        1,
        minimum=0,
        local=True,
        help="Background loaders per learner; 0 loads in the training thread. Raise it for slow storage.",
    )
    loader_kind: str = setting(
        "thread",
        choices=("thread", "process"),
        local=True,
        help="Threads, or processes if the task's Python code is the bottleneck.",
    )
    run: str = setting("", help="Run directory; default runs/<name>-<strategy>-<number>.")
    resume: str = setting("no", help="no, auto (the latest complete checkpoint of the run), best, or the path of a checkpoint.")
    checkpoint_every_epochs: float = setting(1.0, minimum=0.001, help="Epochs between two checkpoints.")
    keep_checkpoints: int = setting(3, minimum=1, help="Latest checkpoints to keep; the best one is kept besides.")
    best_metric: str = setting("loss", help="Validation metric by which the best checkpoint is chosen.")
    best_goal: str = setting("min", choices=("min", "max"), help="Whether a lower or a higher best_metric is better.")
    eval_at_checkpoint: bool = setting(True, help="Evaluate the average model at each checkpoint.")
    store_port: int = setting(
        0,
        minimum=0,
        maximum=65535,
        local=True,
        help="TCP port of the job's store; 0: a Unix socket for learners=N, else a free port.",
    )
    progress: str = setting(
        "auto", choices=("auto", "rich", "plain", "none"), local=True, help="Progress display on the terminal."
    )
    tensorboard: bool = setting(True, help="Also write metrics for TensorBoard, if it is installed.")
    record_order: bool = setting(False, help="Record the order of updates, so that roundelay replay can repeat the run.")

    @property
    def run_dir(self) -> Path | None:
        """The run directory, or None if nothing is written."""
        return Path(self.run) if self.run else None
