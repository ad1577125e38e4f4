"""The network stage: train the LSTM with the engine, realign, and save the result as a system.

The trainer is called as a function, not through the command line. Several learners are forked from this process, after the task
is built, or started as new processes if torch uses a GPU. An interrupted training run is resumed if its fingerprint (settings,
alignments, initial weights) is unchanged, and started from the beginning otherwise.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from roundelay import config as configuration
from roundelay.config import ResolvedConfig, TrainConfig, build_task
from roundelay.core.settings import common_settings
from roundelay.engine.learner import build_strategy
from roundelay.engine.trainer import train
from roundelay.errors import DataError, Interrupted, RoundelayError, UsageError
from roundelay.launch.context import DistributedContext, check_backend, context_from_env, single_process_context
from roundelay.launch.local import start_learners
from roundelay.launch.threads import run_threads
from roundelay.metrics import run_files
from roundelay.recipes.config import FILE, Recipe, load
from roundelay.recipes.pack import archive_for
from roundelay.recipes.pipeline_context import PipelineContext, recreate_dir
from roundelay.recipes.run_layout import LSTM, RunLayout
from roundelay.recipes.stages import align_sets
from roundelay.recipes.systems import open_system, save_network
from roundelay.speech.hmm.align import Alignments
from roundelay.speech.nnet.frame_task import FrameTask
from roundelay.speech.nnet.lstm import WEIGHTS_FILE, AcousticModel, model_folder

logger = logging.getLogger(__name__)
FRAME_TASK = "roundelay.speech.nnet.frame_task:FrameTask"
PACKED_TASK = "roundelay.recipes.packed_task:PackedTask"
PACKED_WORKERS = 2
"""Loader threads per learner with packed examples, unless the recipe sets num_workers."""
FINGERPRINT_FILE = "fingerprint.json"
UNFINGERPRINTED = ("run", "resume", "progress")
"""Settings that do not decide whether a training may be resumed."""


@dataclass(frozen=True)
class TrainedNetwork:
    """A finished training run: its directory, its settings and the task it was trained on."""

    directory: Path
    config: TrainConfig
    task: FrameTask


def train_networks(context: PipelineContext) -> None:
    """Write lstm/. With realign_passes=N the network realigns its training set N times and is trained again each time."""
    layout, passes = context.layout, context.recipe.realign_passes
    for number in range(1, passes + 2):
        if number > 1:
            logger.info("  realigning with the network, pass %d of %d", number - 1, passes)
            align_sets(context, layout.alignments(number), open_system(layout, LSTM))
        trained = train_network(
            context, layout.network(number), context.recipe.train, layout.alignments(number), context.recipe.seed
        )
        finish_network(context, trained, layout.system(LSTM))


def train_network(
    context: PipelineContext,
    directory: Path,
    settings: dict[str, Any],
    alignments: Path,
    seed: int,
    features: dict[str, str] | None = None,
) -> TrainedNetwork:
    """Train the recipe's network in `directory`. Resume a training run with the same fingerprint.

    settings   of the engine, as the recipe's [train] section has them
    features   feature specifications of train and dev; default: those of the run

    Raises KeyboardInterrupt if the training is interrupted; its checkpoint is kept.
    """
    config = training_config(context, settings, alignments, seed, features)
    config = replace(config, run=str(directory), resume="auto", progress=context.progress)
    prepare_directory(directory, training_fingerprint(context, config))
    (directory / run_files.CONFIG).write_text(configuration.dumps(config), encoding="utf-8")
    task = build_task(resolved_config(config, context.recipe.folder))
    run_training(task, config)
    return TrainedNetwork(directory, config, task)


def training_config(
    context: PipelineContext,
    settings: dict[str, Any],
    alignments: Path,
    seed: int,
    features: dict[str, str] | None = None,
) -> TrainConfig:
    """Return the engine's settings for the recipe's network. Pack the training examples first if the recipe says so."""
    layout, network = RunLayout(context.run.resolve()), context.recipe.network
    specs = features or {name: layout.feature_spec(name, network.adapted) for name in ("train", "dev")}
    options = {
        "features": specs["train"],
        "alignments": str(alignments.resolve() / "train"),
        "valid_features": specs["dev"],
        "valid_alignments": str(alignments.resolve() / "dev"),
        "seed": seed,
        **network.task_kwargs(),
    }
    initial = pretrained_model(context)
    if initial is not None:
        options["init_from"] = str(initial.resolve())
    values = {"task": FRAME_TASK, "seed": seed, **settings}
    if network.packed:
        options["archive"] = str(archive_for(options, alignments, jobs=context.jobs, progress=context.progress))
        values = {"num_workers": PACKED_WORKERS, **values, "task": PACKED_TASK}
    return TrainConfig(**values, task_options=options)


# -- what decides whether a training is resumed ----------------------------------------------------------------------------


def training_fingerprint(context: PipelineContext, config: TrainConfig) -> dict[str, str]:
    """Return hashes of everything that an interrupted training run must have in common with this one to be resumed."""
    settings = {key: value for key, value in asdict(config).items() if key not in UNFINGERPRINTED}
    initial = pretrained_model(context)
    return {
        "settings": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16],
        "alignments": alignment_fingerprint(context),
        "initial_weights": weights_hash(initial) if initial is not None else "",
    }


def prepare_directory(directory: Path, fingerprint: dict[str, str]) -> None:
    """Keep the training directory if it has this fingerprint. Otherwise delete its contents and write the fingerprint."""
    file = directory / FINGERPRINT_FILE
    if file.exists() and json.loads(file.read_text()) == fingerprint:
        return
    recreate_dir(directory)
    file.write_text(json.dumps(fingerprint, indent=1))


def alignment_fingerprint(context: PipelineContext) -> str:
    """Return the fingerprint of the align (or states) stage: the path of alignments does not change when their contents do."""
    stamps = [context.layout.stamp(stage) for stage in ("align", "states")]
    return next((json.loads(stamp.read_text())["fingerprint"] for stamp in stamps if stamp.exists()), "unknown")


def weights_hash(model: Path) -> str:
    """Return a hash of the weights in a model's directory. Raise DataError if they cannot be read."""
    try:
        return hashlib.sha256((model / WEIGHTS_FILE).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise DataError(
            f"reading the initial weights failed: {error}",
            where=f"network.init_from, {model}",
            hint="name a recipe, a finished run, or a directory with model.json and model.safetensors",
        ) from error


# -- pretraining -----------------------------------------------------------------------------------------------------------


def pretraining_run(context: PipelineContext) -> PipelineContext | None:
    """Return the context of the recipe whose network initializes this one. Its run is a sibling of this run."""
    folder = context.recipe.pretraining_recipe
    if folder is None:
        return None
    run = context.run.resolve().parent / folder.name
    if (run / FILE).exists():
        raise UsageError(
            f"the run of the pretraining recipe '{folder.name}' would overwrite the directory of a recipe",
            where=str(run),
            hint="choose another run directory, such as run=runs/mine",
        )
    return replace(context, recipe=load(folder), run=run)


def pretrained_model(context: PipelineContext) -> Path | None:
    """Return the directory of the model that initializes the network, or None."""
    before = pretraining_run(context)
    if before is not None:
        return before.layout.system(LSTM)
    return initial_model(context.recipe)


def initial_model(recipe: Recipe) -> Path | None:
    """Return the model that network.init_from names directly, or None."""
    return model_folder(Path(recipe.network.init_from)) if recipe.network.init_from else None


# -- running the engine ------------------------------------------------------------------------------------------------


def run_training(task: FrameTask, config: TrainConfig) -> None:
    """Train `task` on config.learners learners: processes, threads (backend=threads), or this process for one learner.

    Blocks until all learners have ended. Raises KeyboardInterrupt after an interrupt, RoundelayError if a learner failed.
    """
    check_backend(config.backend)
    strategy = build_strategy(config)
    run = Path(config.run)
    if config.learners > 1 and config.backend == "mpi":
        raise UsageError(
            "backend=mpi needs learners started by mpirun (got a recipe)", where="train.backend", hint="use backend=auto"
        )
    if config.learners == 1 or config.backend == "threads":
        try:
            train_here(task, config)
        except Interrupted as error:
            raise KeyboardInterrupt from error
        return
    code = start_learners(
        [sys.executable, "-c", SPAWN, str(run / run_files.CONFIG)],
        lambda: train_rank(task, config),
        config.learners,
        bind_address="127.0.0.1" if config.bind_address == "auto" else config.bind_address,
        port=config.store_port,
        run=run,
        survives_failures=strategy.traits.survives_failures,
        model=run / run_files.MODEL,
    )
    if code == Interrupted.exit_code:
        logger.info("  training interrupted; its checkpoint is kept in %s", run)
        raise KeyboardInterrupt
    if code != 0:
        raise RoundelayError(
            f"training failed with exit code {code}",
            where=str(run),
            hint=f"read the messages above and the files in {run / run_files.LOG}",
        )


def train_here(task: FrameTask, config: TrainConfig) -> None:
    """Train in this process: on one learner, or on one thread per learner."""
    if config.learners == 1:
        set_learner_threads()
        run_engine(task, single_process_context(config.device), config)
    else:
        run_threads(
            lambda context: run_engine(task, context, config),
            size=config.learners,
            simulate_nodes=config.simulate_nodes,
            timeout_s=threading.TIMEOUT_MAX,
        )


def train_rank(task: FrameTask, config: TrainConfig) -> int:
    """Train as one rank of the job that the environment variables describe. Runs in a learner's process."""
    set_learner_threads()
    with context_from_env(
        backend=config.backend,
        bind_address=config.bind_address,
        timeout_s=config.timeout_s,
        failure_s=config.failure_s,
        device=config.device,
        simulate_nodes=config.simulate_nodes,
        digest=common_settings(config),
    ) as context:
        try:
            run_engine(task, context, config)
        except BaseException as error:
            context.abort_job(error)
            raise
    return 0


def train_rank_from(path: str) -> int:
    """Train as one rank with the settings of a file. For learners that cannot be forked, because torch uses a GPU."""
    resolved = configuration.load(path)
    return train_rank(build_task(resolved), resolved.settings)


SPAWN = (
    "import sys; from roundelay.core.interrupts import exit_code_of; from roundelay.recipes import network_stage; "
    "sys.exit(exit_code_of(lambda: network_stage.train_rank_from(sys.argv[1])))"
)


def run_engine(task: FrameTask, context: DistributedContext, config: TrainConfig) -> dict[str, Any]:
    """Call the engine on this rank."""
    record = configuration.computation_settings(config) if config.record_order else None
    return train(task, context, config, record_settings=record)


def set_learner_threads() -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def resolved_config(config: TrainConfig, folder: Path) -> ResolvedConfig:
    """Return `config` with the directory of a user's strategies, and add that directory to sys.path."""
    resolved = ResolvedConfig(config, {}, folder)
    configuration.extend_sys_path(resolved)
    return resolved


# -- the trained network as a system ---------------------------------------------------------------------------------------


def finish_network(context: PipelineContext, trained: TrainedNetwork, directory: Path) -> None:
    """Save the averaged model of a training run as a system in `directory`, with the priors of its outputs."""
    config = trained.config
    model = AcousticModel(trained.task.shape)
    model.load_state_dict(load_file(str(trained.directory / run_files.MODEL)))
    counts = Alignments.open(Path(config.task_options["alignments"])).counts()
    info: dict[str, object] = {
        "strategy": config.strategy,
        "learners": config.learners,
        "epochs": config.epochs,
        "samples": trained.task.samples,
    }
    if context.recipe.network.adapted:
        info["adapted"] = True
    save_network(recreate_dir(directory), model, counts, info)
