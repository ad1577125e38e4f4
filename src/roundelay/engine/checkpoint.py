"""Checkpoints, written without stopping any rank.

Each rank writes its shard into a hidden folder at its own step boundary. The rank that writes the last shard adds the average
model and the manifest and renames the folder, so a folder without a leading dot is complete. Tensors are in safetensors,
everything else in JSON; nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
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

logger = logging.getLogger(__name__)


def folder_name(position: int) -> str:
    """Return the name of the checkpoint at `position` global samples; names sort by position."""
    return f"samples-{position:012d}"


@contextmanager
def disk_errors_as(what: str, where: str) -> Iterator[None]:
    """Raise write errors inside the block as DataError: `what` names the file, `where` its location."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        raise DataError(
            f"writing {what} failed: {cause}",
            where=where,
            hint="free space on that disk, then continue with resume=auto; earlier checkpoints are intact",
        ) from error


class Checkpoints:
    """The checkpoints of one run, from the view of one rank. For the thread of the learner.

    waiting    positions for which this rank has written its shard and other shards are missing
    complete   positions that have become complete since the caller last emptied the list
    """

    def __init__(self, folder: Path, learner: Learner, keep: int, metadata: dict[str, Any]) -> None:
        """`metadata` is added to every manifest; `keep` is the number of checkpoints to keep, 0 for all."""
        self.folder, self.learner, self.keep, self.metadata = folder, learner, keep, metadata
        self.waiting: set[int] = set()
        self.complete: list[int] = []
        folder.mkdir(parents=True, exist_ok=True)
        self._known_failures = 0
        self._strategy_state: dict[str, Any] = {}

    # -- writing ---------------------------------------------------------------------------------------------------

    def save(self, position: int) -> None:
        """Write this rank's shard of the checkpoint at `position` global samples. Does not wait for other ranks."""
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
        """Move complete positions from `waiting` to `complete`, and complete those that waited for a failed rank."""
        for position in sorted(self.waiting):
            if self.learner.job.store.get(f"complete/{position}") is not None:
                self.waiting.discard(position)
                self.complete.append(position)
            elif len(self.learner.watchdog.failed) > self._known_failures:
                self.try_to_complete(position)
        self._known_failures = len(self.learner.watchdog.failed)

    def try_to_complete(self, position: int) -> None:
        """Complete the checkpoint if the shards of all live ranks are there and no other rank does it.

        Raises PeerLost if this rank has been declared failed.
        """
        learner, store = self.learner, self.learner.job.store
        failed = learner.job.membership.failed_ranks()
        if learner.context.rank in failed:
            raise PeerLost(
                f"this rank was declared failed by the other ranks ({failed[learner.context.rank]})",
                where=f"rank {learner.context.rank}",
                hint="check whether this machine was suspended or overloaded; continue with resume=auto",
            )
        live_ranks = [r for r in range(learner.context.size) if r not in failed]
        if any(store.get(f"saved/{position}/{r}") is None for r in live_ranks):
            return
        if store.add(f"completing/{position}", 1) != 1:
            return
        partial, final = self.folder / f".{folder_name(position)}.partial", self.folder / folder_name(position)
        with disk_errors_as("the checkpoint", f"rank {learner.context.rank}, {partial}"):
            meta = self.write_manifest(partial, position, live_ranks)
            for path in partial.iterdir():
                sync(path)
            sync(partial)
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
            sync(self.folder)
        store.set(f"complete/{position}", json.dumps({"spread": meta["spread"]}))
        learner.events.write("checkpoint", position=position, path=final.name, spread=meta["spread"])
        self.prune(position)

    def write_manifest(self, partial: Path, position: int, live_ranks: list[int]) -> dict[str, Any]:
        """Write the average model, then meta.json with sizes and checksums of all files; return its content."""
        learner = self.learner
        node_leaders = [r for r in learner.node_leaders if r in live_ranks]
        mean, spread = average_of_shards(partial, node_leaders)
        buffers = torch.stack([shard_tensor(partial, r, "buffers") for r in node_leaders]).mean(0)
        save_file(model_tensors(learner, mean, buffers), str(partial / "model.safetensors"))
        completed: list[Span] = []
        for r in node_leaders:
            completed += [tuple(s) for s in json.loads((partial / f"rank-{r:03d}.json").read_text())["completed"]]
        files = {p.name: {"bytes": p.stat().st_size, "sha256": digest(p)} for p in sorted(partial.iterdir())}
        meta = {
            "format": FORMAT,
            "position": position,
            "ranks": live_ranks,
            "node_leaders": node_leaders,
            "size": learner.context.size,
            "sharding": learner.strategy.traits.sharding,
            "completed": merge_ranges(completed),
            "spread": spread,
            "files": files,
            **self.metadata,
        }
        (partial / "meta.json").write_text(json.dumps(meta, indent=1))
        return meta

    def prune(self, latest: int) -> None:
        """Delete all but the last `keep` checkpoints, and incomplete ones older than `latest`."""
        complete = sorted(p for p in self.folder.glob("samples-*") if p.is_dir())
        for path in complete[: -self.keep] if self.keep > 0 else []:
            shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob(".samples-*.partial"):
            if path.name < f".{folder_name(latest)}.partial":
                shutil.rmtree(path, ignore_errors=True)

    # -- reading ---------------------------------------------------------------------------------------------------

    def restore(self, path: Path) -> tuple[int, list[Span]]:
        """Load a checkpoint; return its position and the ranges before it that are not done.

        With the same ranks and strategy the state is restored exactly. Otherwise every rank starts from the average model.
        """
        meta = verify(path)
        learner = self.learner
        same = (
            meta["size"] == learner.context.size
            and meta["ranks"] == list(range(meta["size"]))
            and (meta.get("strategy") == self.metadata.get("strategy") and meta["node_leaders"] == learner.node_leaders)
            and in_same_block(path, meta["node_leaders"])
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
            position, missing_ranges = missing_ranges[0][0], []  # static sharding has no gaps: go back to the first one
        learner.completed = [(0, position)] if not missing_ranges else merge_ranges([tuple(s) for s in meta["completed"]])
        if learner.context.rank != learner.node_leaders[0]:
            learner.completed = []
        return position, missing_ranges

    def restore_strategy(self) -> None:
        """Restore the state of the strategy. Call it after `strategy.start`, which initializes that state."""
        strategy = innermost(self.learner.strategy)
        for name, value in self._strategy_state.items():
            old = getattr(strategy, name)
            setattr(strategy, name, replace(old, **value) if is_dataclass(old) and not isinstance(old, type) else value)


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
    return {**state, **notes["strategy"]}


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
    """Return the average model of a checkpoint as a vector."""
    with safe_open(str(folder / "model.safetensors"), "pt") as file:
        return torch.cat([file.get_tensor(slot.name).reshape(-1) for slot in learner.flat.slots])


def verify(path: Path) -> dict[str, Any]:
    """Check sizes and checksums of a checkpoint and return its manifest. Raises DataError if a file is missing or damaged."""
    hint = "choose another checkpoint, or set resume=auto to use the latest intact one"
    try:
        meta: dict[str, Any] = json.loads((path / "meta.json").read_text())
        if meta["format"] != FORMAT:
            raise DataError(
                f"the checkpoint must have format {FORMAT} (got {meta['format']})",
                where=str(path),
                hint="use the version of roundelay that wrote it, or choose another checkpoint",
            )
        for name, entry in meta["files"].items():
            file = path / name
            if not file.is_file():
                raise DataError(f"{name} is missing from the checkpoint", where=str(path), hint=hint)
            if file.stat().st_size != entry["bytes"] or digest(file) != entry["sha256"]:
                raise DataError(f"{name} is damaged: wrong size or checksum", where=str(file), hint=hint)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise DataError(f"reading the checkpoint failed: {error}", where=str(path), hint=hint) from error
    return meta


def latest(folder: Path, log: Callable[[str], None] = logger.warning) -> Path | None:
    """Return the latest intact checkpoint, or None. Damaged ones are skipped and logged."""
    for path in sorted((p for p in folder.glob("samples-*") if p.is_dir()), reverse=True):
        try:
            verify(path)
        except DataError as error:
            log(f"skipping a damaged checkpoint: {error.message} ({path.name})")
            continue
        return path
    return None


def digest(path: Path) -> str:
    """Return the SHA-256 of a file as hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file or folder to disk, so that a later rename cannot overtake its content."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
