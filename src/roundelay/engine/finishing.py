"""The end of a run: write the average model, evaluate it, report the metrics. Any rank may fail at any point of it.

The model is written by one rank, and the metrics of the run are collected by one rank. Both are roles in the store: the lowest
live rank gets them, and if it fails the next one repeats the work. All ranks stay until both are done.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from roundelay.core.files import digest, install, sync
from roundelay.core.wait import role_holder, store_sleep, wait_until
from roundelay.engine.checkpoint import disk_errors_as
from roundelay.engine.evaluator import FINAL, Evaluator
from roundelay.engine.learner import Learner
from roundelay.engine.shards import model_tensors
from roundelay.errors import DataError, PeerLost
from roundelay.fleet.membership import FAILURES
from roundelay.launch.local import MODEL_WRITTEN

MODEL_FILE = "model.safetensors"
REPORTED = "run-reported"
"""Key that is set when the metrics of the whole run have been collected."""
MODEL_CHOSEN = "model-chosen"
"""Key with the file that is or will be the model, claimed by the first rank that has written one."""
POLL_S = 0.25
"""Longest time between two looks at the store; a change of the awaited key ends it at once."""

logger = logging.getLogger(__name__)


def write_model(path: Path, tensors: dict[str, Tensor], owner: int, choose: Callable[[str], str] = str) -> dict[str, Any]:
    """Write tensors under a temporary name, verify the file, rename it; return its size, checksum and writer.

    Several ranks may do this at once: `choose`, a claim in the store, takes a rank's note and returns the note of the first
    one, whose file every rank installs. So all ranks return the note of the installed file, also if its writer dies meanwhile.
    A crash at any point leaves the old file or the complete new one. Raises DataError if the file cannot be written or differs.
    """
    temporary = path.with_name(f".{path.name}.{owner}.partial")
    with disk_errors_as("the model", f"rank {owner}, {path}"):
        save_file({name: t.contiguous() for name, t in tensors.items()}, str(temporary))
        verify_model(temporary, tensors)
        sync(temporary)
        own = {"bytes": temporary.stat().st_size, "sha256": digest(temporary), "rank": owner}
        chosen: dict[str, Any] = json.loads(choose(json.dumps(own)))
        if chosen["rank"] != owner:
            temporary.unlink(missing_ok=True)
        try:
            install(path.with_name(f".{path.name}.{chosen['rank']}.partial"), path)
        except FileNotFoundError:
            if digest(path) != chosen["sha256"]:  # else another rank has installed it
                raise
    return chosen


def verify_model(path: Path, tensors: dict[str, Tensor]) -> None:
    """Raise DataError unless the file holds exactly these tensors."""
    with safe_open(str(path), "pt") as file:
        names = set(file.keys())
        wrong = sorted(names ^ set(tensors)) or [name for name in names if not _same(file.get_tensor(name), tensors[name])]
    if wrong:
        raise DataError(
            f"the written model differs from the model in memory: {', '.join(wrong[:3])}",
            where=str(path),
            hint="check the disk, then continue with resume=auto",
        )


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same bits; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*bits)


class Finisher:
    """The end of the run on one rank. For the thread of the learner; all ranks call `conclude` once."""

    def __init__(self, learner: Learner, evaluator: Evaluator, run: Path | None, evaluates: bool, log: logging.Logger) -> None:
        self.learner, self.evaluator, self.run, self.evaluates, self.log = learner, evaluator, run, evaluates, log
        self.store, self.timeout_s = learner.job.store, learner.options.timeout_s

    def _failed(self) -> dict[int, str]:
        return self.learner.job.membership.failed_ranks()

    def _wait(self, predicate: Callable[[], Any], timeout_s: float, awaited: list[int] | None, *keys: str) -> Any:
        return wait_until(
            predicate,
            timeout_s,
            failures=self._failed if awaited is not None else None,
            awaited=awaited,
            poll_s=POLL_S,
            clock=self.learner.context.runtime.clock,
            sleep=store_sleep(self.store, FAILURES, *keys),
        )

    def conclude(self, mean: Tensor) -> dict[str, Any]:
        """Write and evaluate the average model; return the metrics of this rank, on one rank also those of the whole run.

        Blocks until the model is written and the run is reported. Raises PeerLost if no rank could write the model.
        """
        learner = self.learner
        summary = learner.recorder.summary()
        learner.events.write("summary", **summary)
        self.store.set(f"summary/{learner.rank}", json.dumps(summary))
        result: dict[str, Any] = {"rank": learner.rank, "position": learner.position, **summary}
        if self.run is not None:
            path, buffers = self.run / MODEL_FILE, learner.flat.buffer_vector()

            def write() -> str:
                tensors, choose = model_tensors(learner, mean, buffers), partial(self.store.claim, MODEL_CHOSEN)
                return json.dumps(write_model(path, tensors, learner.rank, choose))

            self._once("model-writer", MODEL_WRITTEN, write, self.timeout_s)
            if self.store.get(MODEL_WRITTEN) is None:
                raise PeerLost(
                    "no rank has written the model",
                    where=f"rank {learner.rank}, {path}",
                    hint="look at the logs of the other ranks; continue with resume=auto",
                )
        limit_s = self.timeout_s
        if self.evaluates:
            began = learner.context.runtime.clock()
            self.evaluator.evaluate(learner.position, mean, None, final=True)
            limit_s += 2 * (learner.context.runtime.clock() - began)  # other ranks may be slower at it

        def report() -> str:
            result.update(self._gather(limit_s))
            return str(learner.rank)

        self._once("reporter", REPORTED, report, limit_s + self.timeout_s)
        self.evaluator.announce(now=True)
        return result

    def _once(self, role: str, done: str, work: Callable[[], str], timeout_s: float) -> None:
        """Make one live rank run `work` and set the key `done` to its result; block until the key is set.

        If that rank fails, the next live rank repeats the work. If it takes longer than `timeout_s`, this rank repeats it.
        """
        rank, size = self.learner.rank, self.learner.context.size
        while self.store.get(done) is None:
            failed = self._failed()
            holder = role_holder(self.store, role, min(set(range(size)) - set(failed), default=rank), self._failed)
            if holder != rank:
                over = self._wait(lambda: self.store.get(done) is not None, timeout_s, [holder], done)
                if over or holder in self._failed():
                    continue
                logger.warning("rank %d did not set '%s' within %.0f s; rank %d does it", holder, done, timeout_s, rank)
            self.store.set(done, work())

    def _gather(self, timeout_s: float) -> dict[str, Any]:
        """Return the metrics of the whole run; wait up to `timeout_s` for the other live ranks' evaluations and summaries."""
        learner = self.learner
        result: dict[str, Any] = {}
        if self.evaluates:
            self._wait(self.evaluator.final_result, timeout_s, None, f"{FINAL}/result", FINAL)
            if metrics := self.evaluator.final_result():
                result["metrics"] = metrics
        self.evaluator.announce(now=True)
        ranks = self._summaries(timeout_s)
        result["ranks"] = ranks
        slowest = max(ranks, key=lambda r: ranks[r]["own_s"] / max(ranks[r].get("steps", 1), 1))
        own, waiting = ranks[slowest]["own_s"], ranks[slowest]["waiting_s"]
        result["slowest_rank"] = {"rank": slowest, "own_s": own, "waiting_s": waiting}
        learner.events.write("run", slowest_rank=result["slowest_rank"], metrics=result.get("metrics"))
        failed = self._failed()
        if failed:
            result["lost"] = {str(r): cause for r, cause in failed.items()}
            self.log.warning("ranks failed: " + "; ".join(f"rank {r} ({cause})" for r, cause in failed.items()))
        if learner.context.size > 1:
            self.log.info(f"slowest rank {slowest}: {own:.1f} s of work, {waiting:.1f} s waiting for other ranks")
        return result

    def _summaries(self, timeout_s: float) -> dict[int, Any]:
        """Return the summaries of all ranks, by rank; wait up to `timeout_s` for those of live ranks."""
        keys = {r: f"summary/{r}" for r in range(self.learner.context.size)}
        texts: dict[str, str | None] = {}
        missing: list[str] = []

        def complete() -> bool:
            failed = self._failed()  # before the summaries: what a rank published before it failed counts
            texts.update(self.store.get_many(list(keys.values())))
            missing[:] = [key for r, key in keys.items() if texts[key] is None and r not in failed]
            return not missing

        wait_until(
            complete,
            timeout_s,
            clock=self.learner.context.runtime.clock,
            sleep=lambda _: self.store.pause(POLL_S, FAILURES, missing[0]),
        )
        return {r: json.loads(text) for r, key in keys.items() if (text := texts[key]) is not None}
