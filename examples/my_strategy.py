"""A custom strategy, in one file outside the package.   Synchronous EASGD: Zhang, Choromanska & LeCun 2015.

    every step:       w_i <- w_i - D(g(w_i))
    every tau steps:  d_i = a (w_i - c);   w_i <- w_i - d_i;   c <- c + L mean_i d_i          L ranks, a = beta / L

An elastic force ties the ranks to a common center c instead of replacing their weights by it, so they keep exploring. Raise
beta (up to 1) if the ranks drift apart, tau if communication dominates.

    python examples/my_strategy.py          checks the laws that its traits promise
    roundelay train frames strategy=my_strategy:Elastic strategy_options.tau=2 learners=2

`roundelay train` imports strategies from the directory of the TOML file, then from the current directory.
"""

from dataclasses import dataclass

from roundelay import Strategy, Traits, Worker, check_strategy
from roundelay.testing.conformance import in_threads


@dataclass
class Elastic(Strategy):
    """Ranks tied to a common center."""

    tau: int = 4
    beta: float = 0.9

    equation = "every tau steps: d_i = a (w_i - c), w_i <- w_i - d_i, c <- c + L mean_i d_i"
    saved = ("c", "steps")  # what a checkpoint must hold
    traits = Traits(conserves_mean=False)  # the center gains what the ranks lose

    def start(self, me: Worker) -> None:
        self.c, self.steps = me.w.clone(), 0

    def step(self, me: Worker) -> None:
        me.add_(-me.delta(me.grad()))
        self.steps += 1
        if self.steps >= self.tau and me.size > 1:
            a = self.beta / me.size
            d = a * (me.w - self.c)
            me.add_(-d)
            self.c = self.c + me.size * me.mean(d)
            self.steps = 0


if __name__ == "__main__":
    for check in check_strategy("my_strategy:Elastic", in_threads, sizes=(1, 2, 3)):
        print("passed:", check)
