"""Evaluation of the average model, shared out over the learners, while training goes on.

Each learner judges its part of the held-out data when a checkpoint has become complete, at its own step boundary; the last one
adds the parts up. With them goes the effective rate of decentralized training: a_e / a = mean_l <g_l, g> / |g|^2, where g is
the gradient at the mean model and g_l the gradient at learner l's model, on one and the same batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from roundelay.core.contracts import Task
from roundelay.engine.learner import Learner


class Evaluator:
    """One learner's part in judging."""

    def __init__(self, task: Task, learner: Learner, say: Callable[[str], None]) -> None:
        self.task, self.learner, self.say = task, learner, say
        self._unsaid: list[tuple[str, int]] = []
        self.on_result: Callable[[dict[str, Any]], None] | None = None
        self.newest = ""
        """The held-out metrics that were said last."""

    def evaluate(self, position: int, mean: Tensor, spread: float | None, final: bool = False) -> None:
        """Judges this learner's part of the model and posts it; the last one to post writes the event."""
        learner = self.learner
        context, store = learner.context, learner.job.store
        began = context.runtime.clock()
        effective = None if final else self._effective_rate(mean)
        with torch.no_grad(), learner.swapped_weights(mean) as module, context.runtime.rng_scope():
            parts = self.task.evaluate(module, context.rank, context.size)
        took = context.runtime.clock() - began
        learner.worker.step_timer.seconds["eval"] += took
        key = f"evaluated/{'final' if final else position}"
        store.set(f"{key}/{context.rank}", json.dumps({"parts": parts, "effective": effective, "seconds": took}))
        self._unsaid.append((key, position))
        if store.add(key, 1) >= context.size - len(learner.job.membership.failed_ranks()) and store.claim(
            f"{key}/sum", str(context.rank)
        ) == str(context.rank):
            self._add_up(key, position, spread, final)

    def _add_up(self, key: str, position: int, spread: float | None, final: bool) -> None:
        learner = self.learner
        notes = [learner.job.store.get(f"{key}/{r}") for r in range(learner.context.size)]
        posted = [json.loads(note) for note in notes if note is not None]
        metrics: dict[str, float] = {}
        for name in posted[0]["parts"]:
            total, count = (sum(p["parts"][name][i] for p in posted) for i in (0, 1))
            metrics[name] = total / max(count, 1)
        ratios = [p["effective"] for p in posted if p["effective"] is not None]
        result: dict[str, Any] = {
            "position": position,
            "metrics": metrics,
            "final": final,
            "seconds": sum(p["seconds"] for p in posted),
        }
        if spread is not None:
            result["spread"] = spread
        if ratios:
            result["effective_rate"] = sum(ratios) / len(ratios)
        learner.events.write("evaluation", **result)
        learner.job.store.set(f"{key}/result", json.dumps(result))
        learner.job.store.set(f"{key}/metrics", json.dumps(metrics))

    def announce(self) -> None:
        """Says what evaluations have come to, whoever added them up."""
        for key, position in list(self._unsaid):
            note = self.learner.job.store.get(f"{key}/result")
            if note is None:
                continue
            self._unsaid.remove((key, position))
            result = json.loads(note)
            metrics = "  ".join(f"{name} {value:.4f}" for name, value in result["metrics"].items())
            self.newest = metrics
            self.say(f"epoch {position / self.task.samples:6.2f}  held-out {metrics}")
            if self.on_result is not None:
                self.on_result(result)

    def _effective_rate(self, mean: Tensor) -> float | None:
        """<g_l, g> / |g|^2 of this learner."""
        learner = self.learner
        if learner.context.size == 1 or not learner.worker.is_node_leader:
            return None
        batch = self.task.batch(0, 0, min(self.task.samples, 32))
        buffers = [(b, b.detach().clone()) for b in learner.module.buffers()]
        try:
            at_mean = self._gradient(mean, batch)
            at_mine = self._gradient(learner.worker.w.clone(), batch)
        finally:
            learner.flat.clear_gradients()
            for buffer, before in buffers:  # batch norm has counted along
                buffer.copy_(before)
        return float(at_mine @ at_mean) / max(float(at_mean @ at_mean), 1e-30)

    def _gradient(self, vector: Tensor, batch: Any) -> Tensor:
        learner = self.learner
        with learner.swapped_weights(vector) as module:
            module.train()
            learner.flat.clear_gradients()
            random = learner.context.runtime.rng_state()
            with learner.context.runtime.rng_scope():
                self.task.loss(module, batch).backward()
            learner.context.runtime.set_rng_state(random)
            return learner.flat.gather(torch.empty_like(learner.flat.phi))
