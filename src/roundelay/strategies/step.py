"""What a worker needs for one step: the samples of the step, timers, and protocols of the optimizer and the topologies."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from roundelay.core.contracts import Matching
from roundelay.core.deferred import Update, Vector

if TYPE_CHECKING:
    from roundelay.strategies.worker import Worker


class LocalOptimizer(Protocol):
    """D: any torch optimizer, as a function from a gradient to an update."""

    def delta(self, g: Vector) -> Update:
        """Return D(g), not yet computed."""

    def state_vector(self) -> Tensor:
        """Return a copy of the optimizer's floating-point state as one vector."""

    def load_state_vector(self, state: Tensor) -> None:
        """Load what `state_vector` returned."""

    def reset_state(self) -> None:
        """Clear the optimizer's state."""

    @property
    def lr(self) -> float:
        """Return the current learning rate."""


class TopologyResolver(Protocol):
    """Resolves the topologies that strategies name by string."""

    def matching(self, name: str, size: int) -> Matching:
        """Return the pairs of every gossip round."""

    def row(self, name: str, rank: int, size: int) -> dict[int, float]:
        """Return row `rank` of the mixing matrix, without zeros."""


@dataclass
class StepInfo:
    """The samples that one step works on."""

    local_samples: int
    """Samples in this rank's batch; 0 if the rank only takes part in the communication."""
    node_samples: int
    """Samples of this worker: of this rank, or of all ranks of its node in a hierarchy."""
    global_samples: int
    """Samples of all ranks in this round (static sharding), or `size` times the usual batch (dynamic sharding)."""
    position: int = 0
    """Global samples before this step. The learning-rate schedule depends on it."""
    total: int = 0
    """Global samples of the whole run; 0 if unknown."""
    start_of_run: int = 0
    """Global samples when this process started training; not 0 after a resume."""


@dataclass
class StepTimer:
    """Seconds per activity, staleness counts and exchange gaps of a worker, since the metrics were last collected."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    staleness: Counter[int] = field(default_factory=Counter)
    gaps: Counter[int] = field(default_factory=Counter)
    """Number of steps by the gradients in a row that ended with them and had no exchange: 0 for a step after an exchange."""


class ActivityTimer:
    """Context manager that adds the time of its block to one activity. A slotted class: a step enters several of them."""

    __slots__ = ("_activity", "_outer", "_start", "_worker")

    def __init__(self, worker: Worker, activity: str) -> None:
        self._worker, self._activity = worker, activity

    def __enter__(self) -> None:
        worker = self._worker
        self._outer, worker.phase = worker.phase, self._activity
        self._start = worker.phase_since = worker.clock()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        worker = self._worker
        worker.step_timer.seconds[self._activity] += worker.clock() - self._start
        worker.phase = self._outer


class CompletedWork:
    """A `Work` whose result exists already."""

    done = True

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def wait(self) -> Tensor:
        return self._x
