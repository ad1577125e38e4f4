"""Contracts between the engine and what it runs on.

`Communicator`, `Store`, `Membership`, `SharedWeights`, `NodeGroup`: what a communication backend must offer.
`Runtime`: clock, RNG, compute and background threads; real or simulated. `Task`: what a user trains.

A method described as *collective* must be called by all ranks of the group, in the same order. It may block until they have.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from roundelay.core.update_log import UpdateLog


@runtime_checkable
class Task(Protocol):
    """A model, its data and its loss: what a user writes to train something."""

    @property
    def samples(self) -> int:
        """Training samples in one epoch."""

    def build(self) -> nn.Module:
        """Return the initialized module. It should be equal on all ranks; the engine copies the weights of rank 0 anyway."""

    def batch(self, epoch: int, start: int, stop: int) -> Any:
        """Return the samples start <= i < stop of the epoch's order, with 0 <= start < stop <= samples."""

    def loss(self, module: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss over the batch's samples, ready for backward()."""

    def evaluate(self, module: nn.Module, part: int, parts: int) -> dict[str, tuple[float, float]]:
        """Return validation metrics of one of `parts` equal parts of the data: name -> (sum, count). 'loss' is required."""


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
    """An iterator over claims and their prepared batches; the next ones are prepared in the background."""

    @property
    def last_s(self) -> float:
        """Seconds the last item was waited for after it had been claimed."""

    def __iter__(self) -> Generator[tuple[C_co, Any], None, None]: ...


class Runtime(Protocol):
    """Services of one rank that can be simulated: clock, RNG, timing of compute, background threads, event log."""

    def clock(self) -> float:
        """Return seconds since an arbitrary start."""

    def cpu_s(self) -> float:
        """Return the CPU seconds this rank has used."""

    def stamp(self) -> str:
        """Return the time as printed at the beginning of log lines."""

    def seed_init(self, number: int) -> None:
        """Seed torch's global RNG before the module is built; the same seed on every rank."""

    def seed_rank(self, number: int) -> None:
        """Seed this rank's RNG, which dropout and the like use from now on."""

    def rng_state(self) -> Tensor:
        """Return the state of this rank's RNG, for a checkpoint."""

    def set_rng_state(self, state: Tensor) -> None: ...

    def rng_scope(self) -> AbstractContextManager[object]:
        """Make torch's global RNG this rank's RNG inside the context."""

    def compute(self, gradient: Callable[[], float], samples: int, slow: float) -> float:
        """Run forward and backward on `samples` samples and return the loss; take `slow` times as long as usual."""

    def prefetch(
        self, claims: Iterable[C], prepare: Callable[[C], Any], samples: Callable[[C], int], loaders: int
    ) -> Prefetcher[C]:
        """Return an iterator over (claim, prepare(claim)). `loaders` background workers draw and prepare claims in advance."""

    def start_periodic(self, poll: Callable[[], None], on_failure: Callable[[], None], every_s: float) -> Callable[[], None]:
        """Call poll() every `every_s` seconds on a background thread; return a function that stops it.

        A runtime that is notified of failed ranks calls on_failure() at once instead of polling.
        """

    def events(self, path: Path | None, rank: int) -> EventWriter:
        """Return the event log of this rank."""

    def owns_terminal(self, rank: int) -> bool:
        """Return whether this rank writes its own log and handles signals."""


class Matching(Protocol):
    """The pairs of each gossip round: a pure function of the round's number."""

    @property
    def edges(self) -> frozenset[tuple[int, int]]:
        """All pairs that any round may contain, lower rank first."""

    def __call__(self, round: int) -> Sequence[int]:
        """Return the partner of every rank; a rank without a partner in this round is its own partner."""


class Work(Protocol):
    """A collective in progress, like torch.distributed.Work."""

    @property
    def done(self) -> bool:
        """Whether wait() would return without blocking."""

    def wait(self) -> Tensor:
        """Block until the result is available and return it."""


class Store(Protocol):
    """The job's key-value store for coordination: counters, notes, failures. No vector passes through it.

    Every method is one round trip to the server and may be called from any thread. All raise PeerLost if the server is lost.
    """

    def set(self, key: str, value: str, ttl_s: float | None = None) -> None:
        """Set a key. With `ttl_s` the key disappears unless it is set again within that time."""

    def get(self, key: str) -> str | None:
        """Return the value, or None if the key is missing. Does not block."""

    def get_many(self, keys: Sequence[str]) -> dict[str, str | None]:
        """Return the values of several keys, all read at one moment."""

    def list(self, prefix: str) -> dict[str, str]:
        """Return all keys that begin with `prefix`, with their values, all read at one moment."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter atomically and return the new value; a missing counter is 0."""

    def compare_and_set(
        self, expected: Mapping[str, str | None], values: Mapping[str, str | None]
    ) -> dict[str, str | None] | None:
        """Write all `values` atomically if every key of `expected` has that value. None means a missing key, in both.

        Return None if the values were written; otherwise nothing was, and the current values of the keys of `expected` are
        returned.
        """

    def claim(self, key: str, value: str) -> str:
        """Set the key if it is missing, atomically; return the value it has now."""

    def pause(self, seconds: float, *keys: str) -> None:
        """Sleep between two polls of `keys`: for `seconds`, or in simulated time until one of the keys is written."""


class SharedWeights(Protocol):
    """A vector that other ranks may read and write, always as a whole and under its lock."""

    @property
    def vector(self) -> Tensor:
        """The vector in its present memory. Read it again after `locked()` has been entered: it may have moved."""

    def locked(self) -> AbstractContextManager[object]:
        """Lock the vector for the calling thread. Waits for no longer than a live process may hold the lock."""

    def count(self, writes: int = 0) -> tuple[int, int]:
        """Count one access and `writes` writes; return (sequence number, version). Call under the lock."""

    @property
    def version(self) -> int:
        """Number of writes so far."""


class GossipHandle(Protocol):
    """The worker's side of background gossip."""

    rounds: int
    """The highest round of any rank; valid after finish()."""

    @property
    def exchanges(self) -> int:
        """Exchanges completed so far, including those that partners started. Does not block."""

    def notify_step(self) -> None:
        """Count one local step, which may start an exchange. Never waits for a lock, a partner or the network."""

    def finish(self) -> None:
        """Collective: answer exchanges until all live ranks are done, complete those that have begun, stop."""

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call: exchanges, seconds, distance between partners, skipped rounds."""


class Membership(Protocol):
    """The failed ranks of the whole job. Ranks are ranks of the job, not of a subgroup."""

    def failed_ranks(self) -> dict[int, str]:
        """Return the failed ranks with the reason of each. One store call."""

    @property
    def cached(self) -> dict[int, str]:
        """The failed ranks as read last: no store call, for hot paths. The heartbeat thread reads them at every beat."""

    def report(self, rank: int, reason: str) -> bool:
        """Report a rank as failed, by one atomic store operation; return whether it is recorded. The first report is kept."""


class NodeGroup(Protocol):
    """Broadcast and reduce among the ranks of one node, rooted at its leader (rank 0 of the group).

    Calls must alternate: one `broadcast`, then one `reduce` per bucket, in the same order on all ranks.
    """

    @property
    def slot(self) -> Tensor | None:
        """Memory in which this rank's vector needs no copy: weights on the leader, gradients elsewhere. None: any memory."""

    def broadcast(self, x: Tensor) -> None:
        """Collective: copy the leader's x to all ranks. The leader must not change x before the next reduce has ended."""

    def reduce(self, x: Tensor) -> Work:
        """Collective: the leader's x, a slice of the vector, becomes the sum. The x of other ranks is undefined afterwards."""


class Communicator(Protocol):
    """One rank's view of a group of ranks."""

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
        """Return the members not known to have failed, as ranks of this group."""

    def silent_peers(self) -> list[int]:
        """Return the live partners with which exchanges fail now, as ranks of this group. Does not block."""

    def all_reduce_mean(self, x: Tensor, weight: float | None = None, deterministic_reduce: bool = False) -> Work:
        """Collective: return the weighted mean as a new tensor. x must not change before wait() has returned.

        With `deterministic_reduce` the sum is in rank order, so the bits do not depend on timing.
        """

    def all_reduce_(self, x: Tensor) -> Work:
        """Collective: x becomes the sum over all ranks, by the backend's native all-reduce."""

    def neighbor_average(self, x: Tensor, row: dict[int, float]) -> Work:
        """Collective among neighbors: the sum over `row` of weight * x of that rank, in rank order. `row` must be symmetric."""

    def broadcast(self, x: Tensor) -> None:
        """Collective: copy x of rank 0 to all ranks."""

    def node_group(self, like: Tensor) -> NodeGroup:
        """Collective: create the node group of this group, for vectors of the shape and type of `like`."""

    def publish(self, vector: Tensor) -> SharedWeights:
        """Collective: return a copy of the vector that other ranks of the group can access."""

    def gossip(self, shared_weights: SharedWeights, matching: Matching, steps_per_exchange: float) -> GossipHandle:
        """Collective: start background exchanges of `shared_weights`, one per `steps_per_exchange` local steps."""

    def remote_add(self, peer: int, d: Tensor) -> int:
        """One-sided: add d to peer's shared vector; return its version before the addition. Blocks for the reply."""

    def remote_get(self, peer: int, out: Tensor) -> int:
        """One-sided: copy peer's shared vector to out; return its version. Blocks for the reply."""

    def record(self, update_log: UpdateLog) -> None:
        """Log all accesses of this rank and its gossip thread to shared vectors from now on."""

    def new_group(self, ranks: Sequence[int], name: str, timeout_s: float | None = None) -> Communicator | None:
        """Collective: create a communicator among `ranks` of this group; return None on all other ranks.

        `timeout_s` is the time limit of its collectives, by default that of this group.
        """

    def bytes_sent(self) -> int:
        """Return the payload bytes this rank has sent."""

    def close(self) -> None: ...
