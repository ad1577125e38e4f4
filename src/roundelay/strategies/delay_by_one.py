"""Delay-by-one.   Cui et al. 2021, equation (1) with T = T_u.

    w_i <- mean_j w_j - D(g_i(w_i))            the mean travels while g is computed at the un-averaged w_i      (2)
    w   <- w - D(mean_j g_j(w_before))         form="gradient": the mean of the last step's gradients           (3)

(2) is our reading of the paper and the default: the mean of the learners is not stale at all, each learner merely sees
the others' last step one step late. (3) is the pipelined all-reduce, kept for comparison: all learners stay equal and
every gradient is applied one step late.

Use it with equally fast learners and large batches: communication is hidden, mixing is perfect. Nothing to set. Weaknesses:
a slow learner slows everybody; on a quadratic the stable rate is half of that of `sync`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from roundelay.strategies.base import Traits
from roundelay.strategies.worker import Worker


@dataclass
class DelayByOne:
    """The global average of the weights travels behind the gradient."""

    form: Literal["weights", "gradient"] = "weights"

    equation: ClassVar[str] = "w_i <- mean_j w_j - D(g_i(w_i))"
    reference: ClassVar[str] = "Cui et al. 2021"
    advice: ClassVar[str] = "Equal learners, large batches: communication is hidden, mixing perfect."
    weakness: ClassVar[str] = "A slow learner slows everybody; half the stable rate of sync on a quadratic."
    saved: ClassVar[tuple[str, ...]] = ("g_before",)
    _traits: ClassVar[Traits] = Traits(
        sharding="static",
        deterministic=True,
        conserves_mean=True,
        contracts=True,
        survives_death=False,
        optimizer_state="keep",
        shares_weights=False,
    )

    @property
    def traits(self) -> Traits:
        # (3) applies the same gradient everywhere: learners that begin equal stay equal, others stay apart
        return self._traits if self.form == "weights" else replace(self._traits, contracts=False, optimizer_state="shared")

    def start(self, me: Worker) -> None:
        self.g_before = torch.empty(0)

    def step(self, me: Worker) -> None:
        if self.form == "gradient" and me.size > 1:  # alone there is no transfer to hide
            self.step_with_last_gradient(me)
            return
        mean = me.start_mean(me.w)
        d = me.delta(me.grad())
        me.assign_(me.wait(mean) - d)

    def step_with_last_gradient(self, me: Worker) -> None:
        mean = me.start_mean(self.g_before) if self.g_before.numel() else None
        g = me.grad()
        g_now = g.share * g.tensor().clone()
        if mean is not None:
            me.add_(-me.delta(me.wait(mean)))
        self.g_before = g_now
