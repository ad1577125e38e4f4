"""Contracts between the engine and what it runs on.

`Communicator`, `Store`, `Membership`, `SharedWeights`, `NodeGroup`: what a communication backend must offer.
`Runtime`: clock, RNG, compute and background threads; real or simulated. `Task`: what a user trains.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from roundelay.core.update_log import UpdateLog


@runtime_checkable
class Task(Protocol):
    """Anything that can be trained."""

    @property
    def samples(self) -> int:
        """Training samples in one epoch."""

    def build(self) -> nn.Module:
        """The module, initialised; the same on every learner (the engine copies rank 0's weights to be sure)."""

    def batch(self, epoch: int, start: int, stop: int) -> Any:
        """The samples at places start <= place < stop of the epoch's order; 0 <= start < stop <= samples."""

    def loss(self, module: nn.Module, batch: Any) -> Tensor:
        """The mean loss over the batch's samples, ready for backward()."""

    def evaluate(self, module: nn.Module, part: int, parts: int) -> dict[str, tuple[float, float]]:
        """Held-out metrics over the part-th of `parts` equal shares: name -> (sum, count). 'loss' must be among them."""


C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)


class EventWriter(Protocol):
    """A log of the events of one rank."""

    def now(self) -> float:
        """Return the time stamped on events."""

    def write(self, event: str, **fields: Any) -> None:
        """Append one event."""

    def close(self) -> None: ...


class Prefetcher(Protocol[C_co]):
    """Work that is prepared while other work is done."""

    @property
    def last_s(self) -> float:
        """How long the last piece was waited for though it was claimed."""

    def __iter__(self) -> Generator[tuple[C_co, Any], None, None]: ...


class Runtime(Protocol):
    """One learner's host."""

    def clock(self) -> float:
        """Seconds, from any beginning."""

    def cpu_s(self) -> float:
        """CPU seconds this learner has used."""

    def stamp(self) -> str:
        """The time as the lines of a log begin with it."""

    def seed_init(self, number: int) -> None:
        """Torch's own dice membership from this number: first weights, the same for all learners."""

    def seed_rank(self, number: int) -> None:
        """From now on the learner's dice (dropout and the like) membership from this number."""

    def rng_state(self) -> Tensor:
        """The state of the learner's dice, for a checkpoint."""

    def set_rng_state(self, state: Tensor) -> None: ...

    def rng_scope(self) -> AbstractContextManager[object]:
        """Inside, torch's dice are this learner's."""

    def compute(self, gradient: Callable[[], float], samples: int, slow: float) -> float:
        """Runs forward and backward on so many samples and returns the loss; `slow` times as long as usual."""

    def prefetch(
        self, claims: Iterable[C], prepare: Callable[[C], Any], samples: Callable[[C], int], loaders: int
    ) -> Prefetcher[C]:
        """The claims with what `prepare` makes of each, claimed and made in the background by so many loaders."""

    def start_periodic(self, look: Callable[[], None], hear: Callable[[], None], every_s: float) -> Callable[[], None]:
        """Calls `look` every so often in the background, or `hear` when somebody has died and that is known without looking.
        Returns what ends it."""

    def events(self, path: Path | None, rank: int) -> EventWriter:
        """Where this learner's events go."""

    def owns_terminal(self, rank: int) -> bool:
        """Whether this learner writes a log of its own and listens to signals."""


class Matching(Protocol):
    """Who meets whom in which round."""

    @property
    def edges(self) -> frozenset[tuple[int, int]]:
        """The pairs that can ever meet, lower rank first."""

    def __call__(self, round: int) -> Sequence[int]:
        """The partner of every member; a member that sits out is its own partner."""


class Work(Protocol):
    """Something under way."""

    @property
    def done(self) -> bool:
        """Whether wait() would return at once."""

    def wait(self) -> Tensor:
        """The result; blocks until it is there."""


class Store(Protocol):
    """The job's small shared memory: counters, notes, membership-calls. Never on the path of a vector."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> str | None:
        """The value, or None at once where there is none."""

    def add(self, key: str, amount: int) -> int:
        """Adds atomically and returns the new value; a missing counter counts as 0."""

    def claim(self, key: str, value: str) -> str:
        """Sets the key if nobody has; returns the value that stands."""

    def pause(self, seconds: float, *keys: str) -> None:
        """Between two looks at these keys: sleeps so long; in virtual time, until one of them is written."""


class SharedWeights(Protocol):
    """A vector that neighbours may read and change. Whole vector at a time, under its lock."""

    vector: Tensor

    def locked(self) -> AbstractContextManager[None]: ...

    def count(self, writes: int = 0) -> tuple[int, int]:
        """Takes the next number of the vector's history and adds `writes` to its version: (number, version).
        Call under the lock."""

    @property
    def version(self) -> int:
        """How often the vector was written."""


class GossipHandle(Protocol):
    """The agent that meets this worker's partners in the background."""

    rounds: int
    """Rounds that everybody has played, known after finish()."""

    def notify_step(self) -> None:
        """The learner has done one more gradient."""

    def finish(self) -> None:
        """The learner has no more work: answer until everybody is done, play to the last common round, stop."""

    def pop_metrics(self) -> dict[str, float]:
        """Figures since the last call: exchanges, bytes, seconds, pair distance."""


class Membership(Protocol):
    """Who of the whole job is dead; ranks here are ranks of the whole job."""

    def failed_ranks(self) -> dict[int, str]:
        """Everybody known to be dead, with the reason."""

    def report(self, rank: int, why: str) -> None:
        """Somebody noticed that a rank is gone."""


class NodeGroup(Protocol):
    """The learners of one machine around their first. Hand-outs and sums alternate; between two hand-outs every part of the
    vector is added up once, in the same parts and order by all."""

    @property
    def slot(self) -> Tensor | None:
        """Where this member's vector costs no copy: the first one's weights, the others' gradients. None: anywhere."""

    def broadcast(self, x: Tensor) -> None:
        """Rendezvous: x of every member becomes that of the first, who leaves it alone until the sum is there."""

    def reduce(self, x: Tensor) -> Work:
        """Rendezvous: the first one's x, a part of a whole vector, becomes the sum over all members; what the others' becomes
        is not said."""


class Communicator(Protocol):
    """One member's view of a group of learners."""

    rank: int
    size: int

    @property
    def ranks(self) -> Sequence[int]:
        """The members' ranks in the whole job."""

    @property
    def store(self) -> Store: ...

    @property
    def membership(self) -> Membership: ...

    def live_ranks(self) -> list[int]:
        """Members not known to be dead, as ranks of this group."""

    def all_reduce_mean(self, x: Tensor, weight: float | None = None, deterministic_reduce: bool = False) -> Work:
        """Rendezvous: the weighted mean of everybody's x, which must stay as it is until waited for. A new tensor."""

    def all_reduce_(self, x: Tensor) -> Work:
        """Rendezvous: x becomes the sum over all members (native all-reduce); for buckets of gradients."""

    def neighbor_average(self, x: Tensor, row: dict[int, float]) -> Work:
        """Rendezvous of neighbours: sum over row of weight * their x, added in rank order. `row` must be symmetric."""

    def broadcast(self, x: Tensor) -> None:
        """Rendezvous: x of every member becomes that of member 0."""

    def node_group(self, like: Tensor) -> NodeGroup:
        """Rendezvous: what a machine's learners need to be one worker, for vectors of this length and type."""

    def publish(self, vector: Tensor) -> SharedWeights:
        """Rendezvous: a published copy of the vector."""

    def gossip(self, shared_weights: SharedWeights, matching: Matching, steps_per_exchange: float) -> GossipHandle:
        """Start the background exchanges of `published`."""

    def remote_add(self, peer: int, d: Tensor) -> int:
        """One-sided: peer's published vector += d. Returns its version before the addition."""

    def remote_get(self, peer: int, out: Tensor) -> int:
        """One-sided: out <- peer's published vector. Returns its version."""

    def record(self, update_log: UpdateLog) -> None:
        """From now on everything this member and its agent do to published vectors is noted down."""

    def new_group(self, ranks: Sequence[int], name: str) -> Communicator | None:
        """Rendezvous of the whole group: a net among these members (None for others)."""

    def bytes_sent(self) -> int:
        """Bytes this member has put on its backend, as payload."""

    def close(self) -> None: ...
