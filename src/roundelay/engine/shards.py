"""The files of a checkpoint: one shard per rank, and their average model. Tensors are in safetensors, the rest in JSON."""

from __future__ import annotations

import errno
import json
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from roundelay.engine.learner import Learner
from roundelay.engine.manifest import is_count, is_ranges
from roundelay.engine.sharding import merge_ranges
from roundelay.errors import DataError
from roundelay.strategies.base import innermost


def unfit(what: str, cause: str) -> DataError:
    """Return the error of a part of a checkpoint that does not fit the run."""
    return DataError(f"{what} in the checkpoint is invalid: {cause}", where="resume", hint="choose another checkpoint")


def in_same_block(folder: Path, ranks: list[int]) -> bool:
    """Return whether all ranks were in the same averaging block when they wrote their shards."""
    notes = [json.loads((folder / f"rank-{rank:03d}.json").read_text()) for rank in ranks]
    return all(n.get("strategy", {}).get("blocks") == notes[0].get("strategy", {}).get("blocks") for n in notes)


def write_shard(folder: Path, learner: Learner) -> None:
    """Write one rank's weights, optimizer state, strategy state, RNG state and completed ranges."""
    worker = learner.worker
    tensors: dict[str, Tensor] = {"random": learner.context.runtime.rng_state(), "buffers": learner.flat.buffer_vector()}
    tensors |= {f"buffer/{name}": b for name, b in learner.flat.counters}
    notes: dict[str, Any] = {"k": worker.k, "steps": learner.steps, "samples_since_mean": worker.samples_since_mean}
    notes["completed"] = merge_ranges(learner.completed)
    by_failed = getattr(learner.sharding, "completed_by_failed", list)  # in the weights by way of exchanges
    notes["completed_by_failed"] = merge_ranges([tuple(span) for span in by_failed()])
    if worker.is_node_leader:
        if worker.shared_weights is not None:
            with worker.shared_weights.locked():
                tensors["w"] = worker.w.clone()
        else:
            tensors["w"] = worker.w.clone()
        optimizer_tensors, notes["optimizer"] = learner.optimizer.to_saved()
        tensors |= {f"optimizer/{name}": t for name, t in optimizer_tensors.items()}
        strategy = innermost(learner.strategy)
        notes["strategy"] = {}
        for name in strategy.saved:
            value = getattr(strategy, name)
            if isinstance(value, Tensor):
                tensors[f"strategy/{name}"] = value.contiguous()
            else:
                notes["strategy"][name] = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    name = f"rank-{learner.context.rank:03d}"
    save_file({k: t.detach().cpu().clone() for k, t in tensors.items()}, str(folder / f"{name}.safetensors"))
    (folder / f"{name}.json").write_text(json.dumps(notes))


def read_shard(folder: Path, rank: int, learner: Learner, exactly: bool) -> dict[str, Any]:
    """Load a shard into the learner and return the state of the strategy, for `restore_strategy`.

    With `exactly`, the optimizer, the RNG and the counters are restored too.
    """
    worker = learner.worker
    notes = json.loads((folder / f"rank-{rank:03d}.json").read_text())
    if not (is_count(notes["k"]) and is_count(notes["steps"]) and is_ranges(notes["completed"])):
        raise unfit(f"rank-{rank:03d}.json", "wrong counters")
    with safe_open(str(folder / f"rank-{rank:03d}.safetensors"), "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    if tensors["buffers"].numel():
        learner.flat.load_buffers(tensors["buffers"])
    with torch.no_grad():
        for name, b in learner.flat.counters:
            b.copy_(tensors[f"buffer/{name}"])
    if exactly:
        learner.context.runtime.set_rng_state(tensors["random"])
        worker.k, worker.samples_since_mean, learner.steps = notes["k"], notes["samples_since_mean"], notes["steps"]
    if not worker.is_node_leader or "w" not in tensors:
        return {}
    if tensors["w"].numel() != worker.w.numel():
        raise DataError(
            f"the checkpoint must have as many parameters as the model, {worker.w.numel()} (got {tensors['w'].numel()})",
            where=str(folder),
            hint="resume with the task and the model of the checkpoint",
        )
    worker.assign_(tensors["w"])
    if not exactly:
        return {}
    saved = {name.partition("/")[2]: t for name, t in tensors.items() if name.startswith("optimizer/")}
    learner.optimizer.from_saved(saved, notes["optimizer"])
    state = {name.partition("/")[2]: t for name, t in tensors.items() if name.startswith("strategy/")}
    state |= dict(notes["strategy"])
    return {name: value for name, value in state.items() if name in innermost(learner.strategy).saved}


def shard_tensor(folder: Path, rank: int, name: str) -> Tensor:
    with safe_open(str(folder / f"rank-{rank:03d}.safetensors"), "pt") as file:
        return file.get_tensor(name)


def average_of_shards(folder: Path, ranks: list[int]) -> tuple[Tensor, float]:
    """Return the mean of the ranks' weights and their spread, sqrt(mean |w - mean|^2) / |mean|."""
    mean = torch.zeros_like(shard_tensor(folder, ranks[0], "w"), dtype=torch.float64)
    for rank in ranks:
        mean += shard_tensor(folder, rank, "w")
    mean /= len(ranks)
    variance = sum(float((shard_tensor(folder, rank, "w") - mean).square().sum()) for rank in ranks) / len(ranks)
    return mean.to(shard_tensor(folder, ranks[0], "w").dtype), (variance**0.5) / max(float(mean.norm()), 1e-30)


def model_tensors(learner: Learner, vector: Tensor, buffers: Tensor) -> dict[str, Tensor]:
    """Return parameters and buffers by name, as `load_state_dict` takes them."""
    tensors = learner.flat.named(vector.cpu())
    start = 0
    for name, b in learner.flat.buffers:
        tensors[name] = buffers[start : start + b.numel()].view_as(b).to(b.dtype).clone()
        start += b.numel()
    for name, t in [*learner.module.named_parameters(), *learner.module.named_buffers()]:
        if name not in tensors:
            tensors[name] = t.detach().cpu().clone()
    return tensors


def read_model(folder: Path, learner: Learner) -> Tensor:
    """Return the average model of a checkpoint as a vector. Raises FileNotFoundError or DataError."""
    if not (folder / "model.safetensors").exists():
        raise FileNotFoundError(errno.ENOENT, "no such file", str(folder / "model.safetensors"))
    try:
        with safe_open(str(folder / "model.safetensors"), "pt") as file:
            vector = torch.cat([file.get_tensor(slot.name).reshape(-1) for slot in learner.flat.slots])
    except SafetensorError as error:
        raise unfit("the model", str(error).splitlines()[0]) from error
    if vector.numel() != learner.flat.phi.numel():
        raise unfit("the model", f"{vector.numel()} parameters instead of {learner.flat.phi.numel()}")
    return vector
