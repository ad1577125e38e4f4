"""A strategy of one's own, in one file outside the package.   Synchronous EASGD: Zhang, Choromanska & LeCun 2015.

    every step:       w_i <- w_i - D(g(w_i))
    every tau steps:  d_i = a (w_i - c);   w_i <- w_i - d_i;   c <- c + L mean_i d_i          L learners, a = beta / L

Springs tie the learners to a common centre c instead of putting them on top of it, so they go on exploring. Turn beta up
(towards 1) when they drift apart, tau up when communication dominates.

    python examples/my_strategy.py          the laws that its traits promise, checked
    roundelay train examples/frames.toml strategy=my_strategy:Elastic strategy_options.tau=2 learners=2

A strategy named on the command line is looked for beside the TOML file, then in the current folder.
"""

from dataclasses import dataclass
from typing import ClassVar

from roundelay.strategies.base import Traits
from roundelay.strategies.worker import Worker
from roundelay.testing.conformance import check_strategy, in_threads


@dataclass
class Elastic:
    """Learners on springs."""

    tau: int = 4
    beta: float = 0.9

    equation: ClassVar[str] = "every tau steps: d_i = a (w_i - c), w_i <- w_i - d_i, c <- c + L mean_i d_i"
    saved: ClassVar[tuple[str, ...]] = ("c", "since")
    traits: ClassVar[Traits] = Traits(
        sharding="static",  # everybody comes to the same mean
        deterministic=True,
        conserves_mean=False,  # what the learners lose, the centre gains
        contracts=True,
        survives_failures=False,
        optimizer_state="keep",
        shares_weights=False,  # nobody reaches into w in the background
    )

    def start(self, me: Worker) -> None:
        self.c, self.since = me.w.clone(), 0

    def step(self, me: Worker) -> None:
        me.add_(-me.delta(me.grad()))
        self.since += 1
        if self.since >= self.tau and me.size > 1:
            a = self.beta / me.size
            d = a * (me.w - self.c)
            me.add_(-d)
            self.c = self.c + me.size * me.mean(d)
            self.since = 0


if __name__ == "__main__":
    for law in check_strategy("my_strategy:Elastic", in_threads, sizes=(1, 2, 3)):
        print("kept:", law)
