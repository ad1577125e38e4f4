"""A strategy of one's own, in one file outside the package: elastic averaging.   EASGD, Zhang et al. 2015, synchronous form.

    every step:       w_i <- w_i - D(g(w_i))
    every tau steps:  d_i <- a (w_i - c),   w_i <- w_i - d_i,   c <- c + L mean_i d_i

Learners are tied to a common centre c by springs instead of being put on top of it, so they go on exploring. Turn a up
when they drift too far apart; L a must stay below 1.

    roundelay train examples/frames.toml strategy=my_strategy:Mine strategy_options.tau=4 learners=2
    python examples/my_strategy.py                         puts it through the battery that every strategy must pass
"""
from dataclasses import dataclass
from typing import ClassVar
from roundelay.core.traits import Traits
@dataclass
class Mine:
    tau: int = 4
    equation: ClassVar[str] = "x"
    saved: ClassVar[tuple[str, ...]] = ()
    traits: ClassVar[Traits] = Traits(claims="turn", deterministic=True, conserves_mean=True, contracts=True, survives_death=False, state_rule="keep", published=False)
    def start(self, me): pass
    def step(self, me):
        me.move(-me.delta(me.grad()))
