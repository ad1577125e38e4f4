"""A strategy in a file outside the package.   Synchronous EASGD: Zhang, Choromanska & LeCun 2015.

    every step:       w_i <- w_i - D(g(w_i))
    every tau steps:  d_i = a (w_i - c);   w_i <- w_i - d_i;   c <- c + L mean_i d_i          L learners, a = beta / L

An elastic force pulls the learners toward a common center c, so they keep exploring. Raise beta (up to 1) if they drift apart,
and tau if communication dominates.

    python examples/my_strategy.py          check what its traits promise
    roundelay train examples/frames.toml strategy=my_strategy:Elastic strategy_options.tau=2 learners=2

The command line imports a strategy from the folder of the TOML file, then from the current folder.
"""

from dataclasses import dataclass

from roundelay import Strategy, Traits, Worker, check_strategy
from roundelay.testing.conformance import in_threads


@dataclass
class Elastic(Strategy):
    """Elastic averaging SGD."""

    tau: int = 4
    beta: float = 0.9

    equation = "every tau steps: d_i = a (w_i - c), w_i <- w_i - d_i, c <- c + L mean_i d_i"
    saved = ("c", "since")
    traits = Traits(
        sharding="static",  # all ranks take part in every mean
        deterministic=True,
        conserves_mean=False,  # the center takes up what the learners lose
        contracts=True,
        survives_failures=False,
        optimizer_state="keep",
        shares_weights=False,  # no background exchanges
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
    for check in check_strategy("my_strategy:Elastic", in_threads, sizes=(1, 2, 3)):
        print("passed:", check)
