"""Evaluation of the average model, divided among the ranks, while training continues.

Each rank evaluates its part of the validation data at its own step boundary after a checkpoint has become complete. The last
rank adds the parts up. It also reports the effective learning rate of decentralized training: a_e / a = mean_l <g_l, g> /
|g|^2, where g is the gradient at the mean model and g_l the gradient at learner l's model, both on the same batch.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from roundelay.core.contracts import Task
from roundelay.core.wait import role_holder
from roundelay.engine.background import BackgroundCalls
from roundelay.engine.learner import Learner
from roundelay.engine.store_watch import StoreWatch

FINAL = "evaluated/final"
RATE_SAMPLES = 32
"""Samples of the batch on which the effective learning rate is measured."""

logger = logging.getLogger(__name__)


class Evaluator:
    """One rank's part of the evaluations. For the thread of the learner.

    log         called with one line per result
    on_result   called with the fields of every `evaluation` event, on every rank
    on_sum      called with position and metrics on the rank that adds them up, before any rank can see the result; on the
                thread of `background`
    newest      metrics of the latest result, as one line
    """

    def __init__(
        self,
        task: Task,
        learner: Learner,
        log: Callable[[str], None] = logger.info,
        watch: StoreWatch | None = None,
        background: BackgroundCalls | None = None,
    ) -> None:
        self.task, self.learner, self.log = task, learner, log
        self.watch = watch or StoreWatch(learner.job.store)
        self.background = background or BackgroundCalls(learner.job.store)
        self._pending: dict[tuple[str, int], float | None] = {}
        self._known_failures = 0
        self.on_sum: Callable[[int, dict[str, float]], None] | None = None
        self.on_result: Callable[[dict[str, Any]], None] | None = None
        self.newest = ""

    def evaluate(self, position: int, mean: Tensor, spread: float | None, final: bool = False) -> None:
        """Evaluate `mean` on this rank's part and post the sums. The last rank to post writes the event.

        Does not wait for other ranks. The sums are posted in the background, those of the final evaluation before it returns.
        """
        learner = self.learner
        context = learner.context
        began = context.runtime.clock()
        effective = None if final else self._effective_rate(mean)
        with torch.no_grad(), learner.swapped_weights(mean) as module, context.runtime.rng_scope():
            parts = self.task.evaluate(module, context.rank, context.size)
        seconds = context.runtime.clock() - began
        learner.worker.step_timer.seconds["eval"] += seconds
        key = FINAL if final else f"evaluated/{position}"
        post = json.dumps({"parts": parts, "effective": effective, "seconds": seconds})
        self._pending[key, position] = spread
        self.background.submit(self._post, key, position, spread, post)
        if final:
            self.background.wait()

    def _post(self, key: str, position: int, spread: float | None, post: str) -> None:
        """Post this rank's sums; add all sums up if they are the last ones. In the background."""
        context, store = self.learner.context, self.learner.job.store
        store.set(f"{key}/{context.rank}", post)
        if store.add(key, 1) >= context.size - len(self.learner.watchdog.failed):
            self._try_to_add_up(key, position, spread)

    def _try_to_add_up(self, key: str, position: int, spread: float | None) -> None:
        """Add up the posts if all live ranks have posted and no other live rank does it. Does not wait for other ranks."""
        learner, store = self.learner, self.learner.job.store
        posts = {r: f"{key}/{r}" for r in range(learner.context.size)}
        texts = store.get_many([f"{key}/result", *posts.values()])
        if texts[f"{key}/result"] is not None:
            return
        failed = learner.job.membership.failed_ranks()
        if any(texts[post] is None for r, post in posts.items() if r not in failed):
            return
        if role_holder(store, f"{key}/sum", learner.rank, learner.job.membership.failed_ranks) == learner.rank:
            self._add_up(
                key, position, spread, [json.loads(text) for post in posts.values() if (text := texts[post]) is not None]
            )

    def _add_up(self, key: str, position: int, spread: float | None, posts: list[dict[str, Any]]) -> None:
        learner, final = self.learner, key == FINAL
        metrics: dict[str, float] = {}
        for name in posts[0]["parts"]:
            total, count = (sum(p["parts"][name][i] for p in posts) for i in (0, 1))
            metrics[name] = total / max(count, 1)
        ratios = [p["effective"] for p in posts if p["effective"] is not None]
        result: dict[str, Any] = {
            "position": position,
            "metrics": metrics,
            "final": final,
            "seconds": sum(p["seconds"] for p in posts),
        }
        if spread is not None:
            result["spread"] = spread
        if ratios:
            result["effective_rate"] = sum(ratios) / len(ratios)
        learner.events.write("evaluation", **result)
        if self.on_sum is not None:
            self.on_sum(position, metrics)
        learner.job.store.claim(f"{key}/result", json.dumps(result))

    def announce(self, now: bool = False) -> None:
        """Log the results that have become complete since the last call, on whichever rank they were added up.

        No store call in this thread, except one if `now` is set. Raises what a call in the background has raised.
        """
        self.background.raise_if_failed()
        failures = len(self.learner.watchdog.failed)
        for (key, position), spread in list(self._pending.items()) if failures > self._known_failures else []:
            # the rank that was to post or to add up may have failed
            self.background.submit(self._try_to_add_up, key, position, spread)
        results = self.watch.read([f"{key}/result" for key, _ in self._pending], now=now)
        for key, position in list(self._pending):
            if (text := results.get(f"{key}/result")) is None:
                continue
            del self._pending[key, position]
            result = json.loads(text)
            self.newest = "  ".join(f"{name} {value:.4f}" for name, value in result["metrics"].items())
            self.log(f"epoch {position / self.task.samples:6.2f}  held-out {self.newest}")
            if self.on_result is not None:
                self.on_result(result)
        self._known_failures = failures

    def final_result(self) -> dict[str, float] | None:
        """Return the metrics of the final evaluation once all live ranks have posted theirs; else None.

        Store calls in this thread; it does not wait for other ranks.
        """
        for (key, position), spread in list(self._pending.items()):
            if key == FINAL and self.learner.job.membership.failed_ranks():
                self.background.wait()
                self._try_to_add_up(key, position, spread)
        text = self.learner.job.store.get(f"{FINAL}/result")
        return json.loads(text)["metrics"] if text is not None else None

    def _effective_rate(self, mean: Tensor) -> float | None:
        """Return <g_l, g> / |g|^2 of this learner, without a trace in buffers, gradients or RNG. None with one learner."""
        learner = self.learner
        if learner.context.size == 1 or not learner.worker.is_node_leader:
            return None
        batch = self.task.batch(0, 0, min(self.task.samples, RATE_SAMPLES))
        buffers = [(b, b.detach().clone()) for b in learner.module.buffers()]
        try:
            at_mean = self._gradient(mean, batch)
            at_own = self._gradient(learner.worker.w.clone(), batch)
        finally:
            learner.flat.clear_gradients()
            for buffer, saved in buffers:  # batch normalization has updated its statistics
                buffer.copy_(saved)
        return float(at_own @ at_mean) / max(float(at_mean @ at_mean), 1e-30)

    def _gradient(self, vector: Tensor, batch: Any) -> Tensor:
        learner = self.learner
        with learner.swapped_weights(vector) as module:
            module.train()
            learner.flat.clear_gradients()
            rng_state = learner.context.runtime.rng_state()
            with learner.context.runtime.rng_scope():
                self.task.loss(module, batch).backward()
            learner.context.runtime.set_rng_state(rng_state)
            return learner.flat.gather(torch.empty_like(learner.flat.phi))
