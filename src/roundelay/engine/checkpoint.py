"""Checkpoints: everything a run needs to go on, written without stopping anybody.

Each learner writes its shard at its own step boundary into a hidden folder; whoever writes the last one adds the average
model and the table of contents and renames the folder. A folder whose name has no leading dot is therefore complete.
Tensors are in safetensors, the rest in JSON; nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from roundelay.engine.learner import Learner
from roundelay.engine.sharding import Span, merge_ranges, uncovered_ranges
from roundelay.errors import DataError, PeerLost
from roundelay.strategies.base import innermost

FORMAT = 1


def folder_name(position: int) -> str:
    return f"samples-{position:012d}"


@contextmanager
def disk_errors_as(what: str, where: str) -> Iterator[None]:
    """A disk that is full, or gone, ends in a sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        raise DataError(
            f"{what} cannot be written: {why}",
            where=where,
            hint="free space on that disk, then go on with resume=auto; what was saved before is untouched",
        ) from error


class Checkpoints:
    """The checkpoints of one run, as one learner sees them."""

    def __init__(self, folder: Path, learner: Learner, keep: int, about: dict[str, Any]) -> None:
        self.folder, self.learner, self.keep, self.about = folder, learner, keep, about
        self.waiting: set[int] = set()
        """Saves that this learner has contributed to and that are not complete yet."""
        self.complete: list[int] = []
        folder.mkdir(parents=True, exist_ok=True)
        self._dead_known = 0
        self._strategy_state: dict[str, Any] = {}

    # -- writing ---------------------------------------------------------------------------------------------------

    def save(self, position: int) -> None:
        """Writes this learner's shard of the checkpoint at that many global samples."""
        learner, store = self.learner, self.learner.job.store
        if store.get(f"complete/{position}") is not None:
            return
        partial = self.folder / f".{folder_name(position)}.partial"
        with disk_errors_as("the checkpoint", f"rank {learner.context.rank}, {partial}"):
            partial.mkdir(exist_ok=True)
            write_shard(partial, learner)
        store.set(f"saved/{position}/{learner.context.rank}", "1")
        self.waiting.add(position)
        self.try_to_complete(position)

    def poll(self) -> None:
        """Looks after saves under way: some may be complete, some may wait for a learner that has died."""
        for position in sorted(self.waiting):
            if self.learner.job.store.get(f"complete/{position}") is not None:
                self.waiting.discard(position)
                self.complete.append(position)
            elif len(self.learner.watchdog.dead) > self._dead_known:
                self.try_to_complete(position)
        self._dead_known = len(self.learner.watchdog.dead)

    def try_to_complete(self, position: int) -> None:
        learner, store = self.learner, self.learner.job.store
        dead = learner.job.membership.failed_ranks()
        if learner.context.rank in dead:
            raise PeerLost(
                f"the others took this learner for lost: {dead[learner.context.rank]}",
                where=f"rank {learner.context.rank}",
                hint="go on with resume=auto; a machine so busy that a process stands still for seconds does this",
            )
        living = [r for r in range(learner.context.size) if r not in dead]
        if any(store.get(f"saved/{position}/{r}") is None for r in living):
            return
        if store.add(f"completing/{position}", 1) != 1:
            return
        partial, whole = self.folder / f".{folder_name(position)}.partial", self.folder / folder_name(position)
        with disk_errors_as("the checkpoint", f"rank {learner.context.rank}, {partial}"):
            meta = self.describe(partial, position, living)
            (partial / "meta.json").write_text(json.dumps(meta, indent=1))
            for path in partial.iterdir():
                sync(path)
            sync(partial)
            if whole.exists():
                shutil.rmtree(whole)
            partial.rename(whole)
            sync(self.folder)
        store.set(f"complete/{position}", json.dumps({"spread": meta["spread"]}))
        learner.events.write("checkpoint", position=position, path=whole.name, spread=meta["spread"])
        self.retire(position)

    def describe(self, partial: Path, position: int, living: list[int]) -> dict[str, Any]:
        """Writes the average model; returns the table of contents."""
        learner = self.learner
        node_leaders = [r for r in learner.node_leaders if r in living]
        mean, spread = average_of_shards(partial, node_leaders)
        buffers = torch.stack([shard_tensor(partial, r, "buffers") for r in node_leaders]).mean(0)
        save_file(model_tensors(learner, mean, buffers), str(partial / "model.safetensors"))
        completed: list[Span] = []
        for r in node_leaders:
            completed += [tuple(s) for s in json.loads((partial / f"rank-{r:03d}.json").read_text())["completed"]]
        files = {p.name: {"bytes": p.stat().st_size, "sha256": digest(p)} for p in sorted(partial.iterdir())}
        return {
            "format": FORMAT,
            "position": position,
            "ranks": living,
            "node_leaders": node_leaders,
            "size": learner.context.size,
            "sharding": learner.strategy.traits.sharding,
            "completed": merge_ranges(completed),
            "spread": spread,
            "files": files,
            **self.about,
        }

    def retire(self, latest: int) -> None:
        """Removes what is older than the last `keep` checkpoints, and remains of older unfinished ones."""
        whole = sorted(p for p in self.folder.glob("samples-*") if p.is_dir())
        for path in whole[: -self.keep] if self.keep > 0 else []:
            shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob(".samples-*.partial"):
            if path.name < f".{folder_name(latest)}.partial":
                shutil.rmtree(path, ignore_errors=True)

    # -- reading ---------------------------------------------------------------------------------------------------

    def restore(self, path: Path) -> tuple[int, list[Span]]:
        """Puts the learner back to where the checkpoint stood; returns the position and the places left out before it."""
        meta = verify(path)
        learner = self.learner
        same = (
            meta["size"] == learner.context.size
            and meta["ranks"] == list(range(meta["size"]))
            and (meta.get("strategy") == self.about.get("strategy") and meta["node_leaders"] == learner.node_leaders)
            and in_one_block(path, meta["node_leaders"])
        )
        source = learner.context.rank if same else meta["node_leaders"][learner.context.rank % len(meta["node_leaders"])]
        self._strategy_state = read_shard(path, source, learner, exactly=same)
        if not same:
            learner.worker.assign_(read_model(path, learner))
        position = int(meta["position"])
        missing_ranges: list[Span] = []
        if meta["sharding"] == "dynamic":
            missing_ranges, position = uncovered_ranges([tuple(s) for s in meta["completed"]], sys.maxsize)
        if learner.strategy.traits.sharding == "static" and missing_ranges:
            position, missing_ranges = missing_ranges[0][0], []  # dealt in turn: go back to the first place nobody completed
        learner.completed = [(0, position)] if not missing_ranges else merge_ranges([tuple(s) for s in meta["completed"]])
        if learner.context.rank != learner.node_leaders[0]:
            learner.completed = []
        return position, missing_ranges

    def restore_strategy(self) -> None:
        """After the strategy's start: puts back what it had saved."""
        strategy = innermost(self.learner.strategy)
        for name, value in self._strategy_state.items():
            now = getattr(strategy, name)
            setattr(strategy, name, replace(now, **value) if is_dataclass(now) and not isinstance(now, type) else value)


def in_one_block(folder: Path, ranks: list[int]) -> bool:
    """Whether no learner had a rendezvous behind it that another had before it: they race, and save as they come by."""
    notes = [json.loads((folder / f"rank-{rank:03d}.json").read_text()) for rank in ranks]
    return all(n.get("strategy", {}).get("blocks") == notes[0].get("strategy", {}).get("blocks") for n in notes)


def write_shard(folder: Path, learner: Learner) -> None:
    """One learner's weights, optimizer, strategy, random state and data position."""
    worker = learner.worker
    tensors: dict[str, Tensor] = {"random": learner.context.runtime.rng_state(), "buffers": learner.flat.buffer_vector()}
    tensors |= {f"buffer/{name}": b for name, b in learner.flat.counters}
    notes: dict[str, Any] = {"k": worker.k, "steps": learner.steps, "samples_since_mean": worker.samples_since_mean}
    notes["completed"] = merge_ranges(learner.completed)
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
    """Restores all but the strategy's own state, which is returned: it goes in after the strategy has started."""
    worker = learner.worker
    notes = json.loads((folder / f"rank-{rank:03d}.json").read_text())
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
            f"the checkpoint has {tensors['w'].numel()} parameters, the model {worker.w.numel()}",
            where=str(folder),
            hint="resume with the task and model it was made with",
        )
    worker.assign_(tensors["w"])
    if not exactly:
        return {}
    saved = {name.partition("/")[2]: t for name, t in tensors.items() if name.startswith("optimizer/")}
    learner.optimizer.from_saved(saved, notes["optimizer"])
    state = {name.partition("/")[2]: t for name, t in tensors.items() if name.startswith("strategy/")}
    return {**state, **notes["strategy"]}


def shard_tensor(folder: Path, rank: int, name: str) -> Tensor:
    with safe_open(str(folder / f"rank-{rank:03d}.safetensors"), "pt") as file:
        return file.get_tensor(name)


def average_of_shards(folder: Path, ranks: list[int]) -> tuple[Tensor, float]:
    """The mean of the learners' weights, and their spread: sqrt(mean |w - mean|^2) / |mean|."""
    mean = torch.zeros_like(shard_tensor(folder, ranks[0], "w"), dtype=torch.float64)
    for rank in ranks:
        mean += shard_tensor(folder, rank, "w")
    mean /= len(ranks)
    apart = sum(float((shard_tensor(folder, rank, "w") - mean).square().sum()) for rank in ranks) / len(ranks)
    return mean.to(shard_tensor(folder, ranks[0], "w").dtype), (apart**0.5) / max(float(mean.norm()), 1e-30)


def model_tensors(learner: Learner, vector: Tensor, buffers: Tensor) -> dict[str, Tensor]:
    """The model by parameter names: what other programs load."""
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
    """The average model of a checkpoint as a vector."""
    with safe_open(str(folder / "model.safetensors"), "pt") as file:
        return torch.cat([file.get_tensor(slot.name).reshape(-1) for slot in learner.flat.slots])


def verify(path: Path) -> dict[str, Any]:
    """The table of contents of a checkpoint whose files are all there and whole."""
    again = "choose another checkpoint, or resume=auto, which takes the newest whole one"
    try:
        meta: dict[str, Any] = json.loads((path / "meta.json").read_text())
        if meta["format"] != FORMAT:
            raise DataError(
                f"the checkpoint has format {meta['format']}, this version reads {FORMAT}",
                where=str(path),
                hint="resume with the version of roundelay that wrote it, or choose another checkpoint",
            )
        for name, said in meta["files"].items():
            file = path / name
            if not file.is_file():
                raise DataError(f"the checkpoint lacks {name}", where=str(path), hint=again)
            if file.stat().st_size != said["bytes"] or digest(file) != said["sha256"]:
                raise DataError(f"{name} is not what was written: truncated or changed", where=str(file), hint=again)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise DataError(f"this is not a readable checkpoint: {error}", where=str(path), hint=again) from error
    return meta


def latest(folder: Path, warn: Any = None) -> Path | None:
    """The newest whole checkpoint; broken ones are passed over with a warning."""
    for path in sorted((p for p in folder.glob("samples-*") if p.is_dir()), reverse=True):
        try:
            verify(path)
        except DataError as error:
            if warn is not None:
                warn(f"passing over a broken checkpoint: {error.message} ({path.name})")
            continue
        return path
    return None


def digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Onto the disk, so that the rename that follows cannot come before the contents."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
