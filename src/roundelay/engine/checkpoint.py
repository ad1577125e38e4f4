"""Checkpoints, written without stopping any rank.

Each rank writes its shard into a hidden folder at its own step boundary. The rank that writes the last shard adds the average
model and the manifest and renames the folder, so a folder without a leading dot is complete. Tensors are in safetensors,
everything else in JSON; nothing is pickled.

The rank that completes a checkpoint works in a folder of its own, with hard links to the shards. If it fails, another rank does
the same in another folder, and whichever is renamed first is the checkpoint.
"""

from __future__ import annotations

import errno
import json
import logging
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

from roundelay.core.files import digest, sync
from roundelay.core.wait import role_holder
from roundelay.engine.best import best_position
from roundelay.engine.learner import Learner
from roundelay.engine.manifest import (
    FORMAT,
    MANIFEST,
    damage_as_data_error,
    folder_name,
    is_count,
    is_ranges,
    read_best,
    seal,
    verify,
)
from roundelay.engine.sharding import Span, merge_ranges, uncovered_ranges
from roundelay.errors import DataError, PeerLost
from roundelay.strategies.base import innermost

logger = logging.getLogger(__name__)


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
        self.base: list[Span] = []
        """Ranges that were done before this run."""
        self._known_failures = 0
        self._strategy_state: dict[str, Any] = {}

    # -- writing ---------------------------------------------------------------------------------------------------

    def save(self, position: int) -> None:
        """Write this rank's shard of the checkpoint at `position` global samples. Does not wait for other ranks."""
        learner, store = self.learner, self.learner.job.store
        if position in self.waiting or store.get(f"complete/{position}") is not None:
            return
        self.raise_if_fenced()
        partial = self._partial(position)
        try:
            with disk_errors_as("the checkpoint", f"rank {learner.context.rank}, {partial}"):
                partial.mkdir(exist_ok=True)
                write_shard(partial, learner)
        except DataError:
            self.raise_if_fenced()  # the other ranks have completed and moved the folder
            raise
        store.set(f"saved/{position}/{learner.context.rank}", "1")
        self.waiting.add(position)
        self.try_to_complete(position)

    def _partial(self, position: int) -> Path:
        """Return the folder in which the shards of a checkpoint are collected."""
        return self.folder / f".{folder_name(position)}.partial"

    def raise_if_fenced(self) -> None:
        """Raise PeerLost if this rank has been declared failed."""
        rank = self.learner.context.rank
        failed = self.learner.job.membership.failed_ranks()
        if rank in failed:
            raise PeerLost(
                f"this rank was declared failed by the other ranks ({failed[rank]})",
                where=f"rank {rank}",
                hint="check whether this machine was suspended or overloaded; continue with resume=auto",
            )

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
        """Complete the checkpoint if the shards of all live ranks are there and no other live rank does it.

        Shards of ranks that failed after they had written them belong to it. Raises PeerLost if this rank has been declared
        failed.
        """
        learner, store = self.learner, self.learner.job.store
        self.raise_if_fenced()
        failed = learner.job.membership.failed_ranks()
        saved = [r for r in range(learner.context.size) if store.get(f"saved/{position}/{r}") is not None]
        if set(range(learner.context.size)) - set(failed) - set(saved):
            return
        rank = learner.context.rank
        if role_holder(store, f"completing/{position}", rank, learner.job.membership.failed_ranks) != rank:
            return
        own, final = self.folder / f".{folder_name(position)}.{rank}.partial", self.folder / folder_name(position)
        try:
            with disk_errors_as("the checkpoint", f"rank {rank}, {own}"):
                shutil.rmtree(own, ignore_errors=True)
                own.mkdir()
                for r in saved:
                    for kind in ("json", "safetensors"):
                        link(self._partial(position) / f"rank-{r:03d}.{kind}", own)
                meta = self.write_manifest(own, position, saved)
                for path in own.iterdir():
                    sync(path)
                sync(own)
                replaces = store.get(f"complete/{position}") is None and not learner_is_fenced(learner)
                if not rename_folder(own, final, replaces):
                    return  # another rank took over
                sync(self.folder)
        except DataError:
            if store.get(f"complete/{position}") is not None:  # another rank took over and deleted the shards
                return
            self.raise_if_fenced()
            raise
        store.set(f"complete/{position}", json.dumps({"spread": meta["spread"]}))
        learner.events.write("checkpoint", position=position, path=final.name, spread=meta["spread"])
        shutil.rmtree(self._partial(position), ignore_errors=True)
        self.prune(position)

    def write_manifest(self, partial: Path, position: int, ranks: list[int]) -> dict[str, Any]:
        """Write the average model of the shards of `ranks`, then meta.json with sizes and checksums; return its content."""
        learner = self.learner
        node_leaders = [r for r in learner.node_leaders if r in ranks]
        mean, spread = average_of_shards(partial, node_leaders)
        buffers = torch.stack([shard_tensor(partial, r, "buffers") for r in node_leaders]).mean(0)
        save_file(model_tensors(learner, mean, buffers), str(partial / "model.safetensors"))
        completed: list[Span] = list(self.base)
        for r in node_leaders:
            notes = json.loads((partial / f"rank-{r:03d}.json").read_text())
            completed += [(start, stop) for start, stop in notes["completed"] + notes["completed_by_failed"]]
        files = {p.name: {"bytes": p.stat().st_size, "sha256": digest(p)} for p in sorted(partial.iterdir())}
        meta = {
            "format": FORMAT,
            "position": position,
            "ranks": ranks,
            "node_leaders": node_leaders,
            "size": learner.context.size,
            "sharding": learner.strategy.traits.sharding,
            "completed": merge_ranges(completed),
            "spread": spread,
            "files": files,
            **self.metadata,
        }
        (partial / MANIFEST).write_text(seal(meta), encoding="utf-8")
        return meta

    def prune(self, latest: int) -> None:
        """Delete all but the best and the last `keep` checkpoints up to `latest`, and incomplete ones older than `latest`."""
        newest = best_position(self.learner.job.store)
        note = json.loads(newest[1]) if newest is not None else read_best(self.folder)
        kept = folder_name(note["position"]) if note is not None else ""
        complete = sorted(p for p in self.folder.glob("samples-*") if p.is_dir() and p.name <= folder_name(latest))
        for path in complete[: -self.keep] if self.keep > 0 else []:
            if path.name != kept:
                shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob(".samples-*.partial"):
            if path.name < f".{folder_name(latest)}":
                shutil.rmtree(path, ignore_errors=True)

    # -- reading ---------------------------------------------------------------------------------------------------

    def restore(self, path: Path) -> tuple[int, list[Span]]:
        """Load a checkpoint; return its position and the ranges before it that are not done.

        With the same ranks and strategy the state is restored exactly. Otherwise every rank starts from the average model.
        Raises DataError if the checkpoint is damaged or does not fit.
        """
        meta = verify(path)
        with damage_as_data_error(path):
            return self._restore(path, meta)

    def _restore(self, path: Path, meta: dict[str, Any]) -> tuple[int, list[Span]]:
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
        # all ranks keep what is done, so that the failure of one rank does not lose it
        self.base = merge_ranges([tuple(s) for s in meta["completed"]]) if missing_ranges else [(0, position)] * (position > 0)
        return position, missing_ranges

    def restore_strategy(self) -> None:
        """Restore the state of the strategy. Call it after `strategy.start`, which initializes that state."""
        strategy = innermost(self.learner.strategy)
        for name, value in self._strategy_state.items():
            old = getattr(strategy, name, None)
            if is_dataclass(old) and not isinstance(old, type):
                try:
                    value = replace(old, **value)
                except TypeError as error:
                    raise unfit(f"the state '{name}' of the strategy", str(error)) from error
            elif isinstance(old, Tensor) and (not isinstance(value, Tensor) or value.shape != old.shape):
                raise unfit(f"the state '{name}' of the strategy", "wrong shape")
            elif isinstance(old, int | float) and not isinstance(value, int | float):
                raise unfit(f"the state '{name}' of the strategy", "not a number")
            setattr(strategy, name, value)


def unfit(what: str, cause: str) -> DataError:
    """Return the error of a part of a checkpoint that does not fit the run."""
    return DataError(f"{what} in the checkpoint is invalid: {cause}", where="resume", hint="choose another checkpoint")


def learner_is_fenced(learner: Learner) -> bool:
    """Return whether this rank has been declared failed."""
    return learner.context.rank in learner.job.membership.failed_ranks()


def link(source: Path, folder: Path) -> None:
    """Link a file into a folder, or copy it where the disk has no hard links."""
    try:
        os.link(source, folder / source.name)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, folder / source.name)


def rename_folder(folder: Path, final: Path, replaces: bool) -> bool:
    """Rename a folder. If `final` exists, replace it, or with `replaces` false delete `folder` and return False."""
    try:
        folder.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not replaces:
            shutil.rmtree(folder, ignore_errors=True)
            return False
        old = folder.with_name(f"{folder.name}.old.partial")  # hidden, so never read; deleted at the next start at the latest
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        folder.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    return True


def delete_partial(folder: Path) -> None:
    """Delete the incomplete checkpoints of earlier processes. Call it on one rank, before any rank writes a checkpoint."""
    for path in folder.glob(".*.partial"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


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
