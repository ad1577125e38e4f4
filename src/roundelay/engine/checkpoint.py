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
import re
import shutil
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from roundelay.core.contracts import Store
from roundelay.core.files import digest, sync
from roundelay.core.wait import role_holder
from roundelay.engine.background import BackgroundCalls
from roundelay.engine.best import mark_pruned
from roundelay.engine.learner import Learner
from roundelay.engine.manifest import FORMAT, MANIFEST, damage_as_data_error, folder_name, seal, verify
from roundelay.engine.sharding import DynamicSharding, Span, merge_ranges, uncovered_ranges
from roundelay.engine.shards import (
    average_of_shards,
    in_same_block,
    model_tensors,
    read_model,
    read_shard,
    shard_tensor,
    unfit,
    write_shard,
)
from roundelay.engine.store_watch import StoreWatch
from roundelay.errors import DataError, PeerLost
from roundelay.strategies.base import innermost

SETTLED = "complete/"
ABANDONED = "abandoned"
"""Value of the key of a position that will not be completed."""
PARTIAL = re.compile(r"\.samples-(\d+)(?:\.(\d+))?\.partial")
"""Folder of the shards of a checkpoint, or with a rank the folder in which that rank completes it."""

logger = logging.getLogger(__name__)


def settled_key(position: int) -> str:
    """Return the key that exists once a checkpoint is complete or abandoned."""
    return f"{SETTLED}{position}"


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

    That thread writes the shards. What needs the store runs in the background: publishing a shard, completing a checkpoint.

    The key `complete/{position}` settles a position for all ranks. It is claimed once, with the spread of the checkpoint or
    with "abandoned": several positions wait while the failure of a rank is awaited, and only the newest one is completed.

    waiting    positions for which this rank has written its shard and other shards are missing
    complete   (position, spread) of the checkpoints that have become complete since the caller last emptied the list
    """

    def __init__(
        self,
        folder: Path,
        learner: Learner,
        keep: int,
        metadata: dict[str, Any],
        watch: StoreWatch | None = None,
        background: BackgroundCalls | None = None,
    ) -> None:
        """`metadata` is added to every manifest; `keep` is the number of checkpoints to keep, 0 for all."""
        self.folder, self.learner, self.keep, self.metadata = folder, learner, keep, metadata
        self.watch = watch or StoreWatch(learner.job.store)
        self.background = background or BackgroundCalls(learner.job.store)
        self.waiting: set[int] = set()
        self.complete: list[tuple[int, float | None]] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.base: list[Span] = []
        """Ranges that were done before this run."""
        self._saved: set[int] = set()
        self._known_failures = 0
        self._strategy_state: dict[str, Any] = {}

    # -- writing ---------------------------------------------------------------------------------------------------

    def save(self, position: int) -> None:
        """Write this rank's shard of the checkpoint at `position` global samples. Waits for neither other ranks nor the store.

        Positions must increase; a position that was saved before is ignored. Raises DataError if the disk refuses the shard,
        and what an earlier call in the background has raised.
        """
        rank = self.learner.context.rank
        if position in self._saved:
            return
        self._saved.add(position)
        partial = self._partial(position)
        try:
            with disk_errors_as("the checkpoint", f"rank {rank}, {partial}"):
                partial.mkdir(exist_ok=True)
                write_shard(partial, self.learner)
        except DataError as error:
            self.raise_if_fenced()  # the other ranks have completed and moved the folder
            if self._is_settled(position, error):
                return
            raise
        self.waiting.add(position)
        self.background.submit(self._publish, position)

    def _publish(self, position: int) -> None:
        """Tell the other ranks that the shard of this rank is there; complete the checkpoint if it is the last one.

        In the background. Four store calls; more, but not one per rank, after a failure and to complete the checkpoint.
        """
        learner, store = self.learner, self.learner.job.store
        rank, size = learner.context.rank, learner.context.size
        self.raise_if_fenced()
        if store.get(settled_key(position)) is not None:  # the folder was deleted before this rank wrote into it
            shutil.rmtree(self._partial(position), ignore_errors=True)
            return
        store.set(f"saved/{position}/{rank}", "1")
        if store.add(f"saved/{position}", 1) >= size - len(learner.watchdog.failed):
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

    def poll(self, now: bool = False) -> None:
        """Move complete positions from `waiting` to `complete` and drop abandoned ones.

        After a new failure, complete the newest position that waited for it, in the background. No store call in this thread,
        except one if `now` is set. Raises what a call in the background has raised.
        """
        self.background.raise_if_failed()
        failures = len(self.learner.watchdog.failed)
        if failures > self._known_failures:
            self._known_failures = failures
            self.background.submit(self._complete_newest)
        settled = self.watch.read([settled_key(position) for position in self.waiting], now=now)
        for position in sorted(self.waiting):
            text = settled.get(settled_key(position))
            if text is not None:
                self.waiting.discard(position)
                if text != ABANDONED:
                    self.complete.append((position, json.loads(text)["spread"]))

    def _complete_newest(self) -> None:
        """Complete the newest position for which the shards of all live ranks are there. In the background."""
        waiting = set(self.waiting)
        counts = self.learner.job.store.get_many([f"saved/{position}" for position in waiting])
        needed = self.learner.context.size - len(self.learner.watchdog.failed)
        for position in sorted(waiting, reverse=True):
            if int(counts[f"saved/{position}"] or 0) >= needed and self.try_to_complete(position):
                return

    def try_to_complete(self, position: int) -> bool:
        """Complete the checkpoint if the shards of all live ranks are there and no other live rank does it. In the background.

        Return whether all shards are there. Shards of ranks that failed after they had written them belong to the checkpoint.
        Raises PeerLost if this rank has been declared failed.
        """
        learner, store = self.learner, self.learner.job.store
        rank, size = learner.context.rank, learner.context.size
        self.raise_if_fenced()
        failed = learner.job.membership.cached
        notes = store.get_many([settled_key(position), *(f"saved/{position}/{r}" for r in range(size))])
        if notes[settled_key(position)] is not None:
            return True
        saved = [r for r in range(size) if notes[f"saved/{position}/{r}"] is not None]
        if set(range(size)) - set(failed) - set(saved):
            return False
        if role_holder(store, f"completing/{position}", rank, learner.job.membership.failed_ranks) != rank:
            return True
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
                replaces = store.get(settled_key(position)) is None and not learner_is_fenced(learner)
                if not rename_folder(own, final, replaces):
                    return True  # another rank took over
                sync(self.folder)
        except DataError as error:
            if self._is_settled(position, error):  # another rank took over or abandoned it, and deleted the shards
                shutil.rmtree(own, ignore_errors=True)
                return True
            self.raise_if_fenced()
            raise
        if store.claim(settled_key(position), json.dumps({"spread": meta["spread"]})) != ABANDONED:
            learner.events.write("checkpoint", position=position, path=final.name, spread=meta["spread"])
        shutil.rmtree(self._partial(position), ignore_errors=True)
        self.prune(position)
        return True

    def _is_settled(self, position: int, error: DataError) -> bool:
        """Return whether a position is complete or abandoned, so that the files which `error` did not find are not needed.

        If files are missing and a later checkpoint is complete, the position is abandoned by this call.
        """
        store = self.learner.job.store
        settled = store.list(SETTLED)
        if settled_key(position) in settled:
            return True
        later = any(text != ABANDONED and int(key[len(SETTLED) :]) > position for key, text in settled.items())
        if later and isinstance(error.__cause__, FileNotFoundError):
            store.claim(settled_key(position), ABANDONED)
            return True
        return False

    def write_manifest(self, partial: Path, position: int, ranks: list[int]) -> dict[str, Any]:
        """Write the average model of the shards of `ranks`, then meta.json with sizes and checksums; return its content.

        Failed ranks without a shard count with the samples they had completed: their updates are in the other ranks' weights by
        way of exchanges, but for the last few that they made after the other ranks had written their shards.
        """
        learner = self.learner
        node_leaders = [r for r in learner.node_leaders if r in ranks]
        mean, spread = average_of_shards(partial, node_leaders)
        buffers = torch.stack([shard_tensor(partial, r, "buffers") for r in node_leaders]).mean(0)
        save_file(model_tensors(learner, mean, buffers), str(partial / "model.safetensors"))
        completed: list[Span] = list(self.base)
        absent = set(learner.job.membership.cached) - set(ranks)
        if absent and isinstance(learner.sharding, DynamicSharding):
            completed += learner.sharding.completed_by(absent)
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
        """Delete all but the best and the last `keep` checkpoints up to `latest`, and what is left of earlier incomplete ones.

        Call it when all live ranks have written their shards of `latest`: earlier positions that no live rank is completing
        are abandoned. Folders of positions that are not settled, and those in which another live rank works, are not touched.
        """
        complete = sorted(p for p in self.folder.glob("samples-*") if p.is_dir() and p.name <= folder_name(latest))
        numbers = {path: path.name.removeprefix("samples-") for path in (complete[: -self.keep] if self.keep > 0 else [])}
        old = {int(number): path for path, number in numbers.items() if number.isdigit()}
        for position in mark_pruned(self.learner.job.store, self.folder, list(old)) if old else []:
            shutil.rmtree(old[position], ignore_errors=True)
        partial = [(path, match) for path in self.folder.iterdir() if (match := PARTIAL.fullmatch(path.name))]
        earlier = {position for _, match in partial if (position := int(match[1])) < latest}
        settled = self._abandon(earlier | {p for p in set(self.waiting) if p < latest})
        failed = self.learner.job.membership.cached
        for path, match in partial:
            owner = self.learner.context.rank if match[2] is None else int(match[2])
            if int(match[1]) in settled and (owner == self.learner.context.rank or owner in failed):
                delete_folder(path)

    def _abandon(self, positions: set[int]) -> set[int]:
        """Abandon those of the positions that are not settled and that no other live rank is completing; return the settled."""
        if not positions:
            return set()
        store, rank = self.learner.job.store, self.learner.context.rank
        texts = store.get_many([settled_key(position) for position in positions])
        settled = {position for position in positions if texts[settled_key(position)] is not None}
        for position in sorted(positions - settled):
            holder = current_holder(store, f"completing/{position}", self.learner.job.membership.cached)
            if holder is None or holder == rank:
                store.claim(settled_key(position), ABANDONED)
                settled.add(position)
                logger.info("checkpoint %s is not completed: a later one is complete", folder_name(position))
        return settled

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


def current_holder(store: Store, role: str, failed: Collection[int]) -> int | None:
    """Return the live rank that holds a role (see `role_holder`), or None."""
    number = 0
    while (text := store.get(f"{role}/{number}")) is not None:
        if int(text) not in failed:
            return int(text)
        number += 1
    return None


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


def delete_folder(path: Path) -> None:
    """Delete a folder that a suspended process may still rename: it finds all of it or nothing."""
    old = path.with_name(f"{path.name}.old.partial")
    shutil.rmtree(old, ignore_errors=True)
    with suppress(OSError):  # another rank deletes it, too
        path.rename(old)
    shutil.rmtree(old, ignore_errors=True)


def delete_partial(folder: Path) -> None:
    """Delete the incomplete files and folders of earlier processes. Call it on one rank, before any rank writes there."""
    for path in folder.glob(".*.partial"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
