"""The best checkpoint of a run by a validation metric, named in ckpt/best.json and never deleted.

The sequence best/0, best/1, … in the store holds the bests so far. Each is claimed once and is better than the one before, so
ranks that add up evaluations at the same time agree on the last one.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

from roundelay.core.contracts import Store
from roundelay.core.files import write_text
from roundelay.engine.learner import Learner
from roundelay.engine.manifest import BEST, folder_name, read_best

SEQUENCE = "best/"
PRUNED = "pruned/"

logger = logging.getLogger(__name__)


class BestCheckpoint:
    """The best checkpoint from the view of one rank. For the thread of the learner."""

    def __init__(self, folder: Path, learner: Learner, metric: str, goal: str) -> None:
        """`goal` is min or max. A best.json for the same metric of an earlier part of the run is continued."""
        self.folder, self.learner, self.metric, self.sign = folder, learner, metric, 1.0 if goal == "min" else -1.0
        self._warned = False

    def update(self, position: int, metrics: dict[str, float]) -> None:
        """Compare the checkpoint at `position` with the best so far; write best.json if it is better."""
        value = metrics.get(self.metric)
        if value is None:
            if not self._warned and self.learner.rank == 0:
                logger.warning("best_metric=%s is not among the metrics (%s)", self.metric, ", ".join(metrics))
            self._warned = True
            return
        store: Store = self.learner.job.store
        if not math.isfinite(value) or not (self.folder / folder_name(position)).is_dir():
            return
        note = {"position": position, "checkpoint": folder_name(position), "metric": self.metric, "value": value}
        number = 0
        earlier = read_best(self.folder)
        if (
            earlier is not None
            and earlier["metric"] == self.metric
            and (self.folder / folder_name(earlier["position"])).is_dir()
        ):
            store.claim(f"{SEQUENCE}0", json.dumps(earlier))
        if (newest := best_position(store)) is not None:
            number = newest[0]
        while True:
            key, pruned = f"{SEQUENCE}{number}", pruned_key(position)
            conflict = store.compare_and_set({key: None, pruned: None}, {key: json.dumps(note)})
            if conflict is None:
                break
            if conflict[pruned] is not None:
                return
            holder = json.loads(conflict[key] or "")
            if holder["position"] == position and holder["value"] == value:
                break
            if self.sign * value >= self.sign * holder["value"]:
                return
            number += 1
        newest = best_position(store)
        while newest is not None:
            write_text(self.folder / BEST, newest[1], str(self.learner.rank))
            written, newest = newest, best_position(store)
            if newest == written:  # else another rank may have written an older one meanwhile
                return


def pruned_key(position: int) -> str:
    """Return the key that exists once a checkpoint is to be deleted. It is not the best one, and will not be."""
    return f"{PRUNED}{position}"


def mark_pruned(store: Store, folder: Path, positions: list[int]) -> list[int]:
    """Mark checkpoints as deleted, in one transaction that excludes the best one; return those that may be deleted."""
    while True:
        newest = best_position(store)
        note = json.loads(newest[1]) if newest is not None else read_best(folder)
        deleted = [position for position in positions if note is None or position != note["position"]]
        following = {f"{SEQUENCE}{0 if newest is None else newest[0] + 1}": None}
        if not deleted or store.compare_and_set(following, {pruned_key(position): "1" for position in deleted}) is None:
            return deleted


def best_position(store: Store) -> tuple[int, str] | None:
    """Return the last entry of the sequence and its number; None if there is none. One store call."""
    entries = {int(key[len(SEQUENCE) :]): text for key, text in store.list(SEQUENCE).items()}
    return max(entries.items(), default=None)
