"""What a wire must offer: the verbs that travel.

A wire (threads, shared memory, torch.distributed, MPI, virtual time) implements `Net`. Workers are written against it, so
a strategy never knows who carries its vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor


class Matching(Protocol):
    """Who meets whom in which round."""

    @property
    def edges(self) -> frozenset[tuple[int, int]]:
        """The pairs that can ever meet, lower rank first."""

    def __call__(self, round: int) -> Sequence[int]:
        """The partner of every member; a member that sits out is its own partner."""


class Pending(Protocol):
    """Something under way."""

    @property
    def done(self) -> bool:
        """Whether wait() would return at once."""

    def wait(self) -> Tensor:
        """The result; blocks until it is there."""


class Store(Protocol):
    """The job's small shared memory: counters, notes, roll-calls. Never on the path of a vector."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> str | None:
        """The value, or None at once where there is none."""

    def add(self, key: str, amount: int) -> int:
        """Adds atomically and returns the new value; a missing counter counts as 0."""

    def claim(self, key: str, value: str) -> str:
        """Sets the key if nobody has; returns the value that stands."""

    def pause(self, seconds: float, *keys: str) -> None:
        """Between two looks at these keys: sleeps so long; in virtual time, until one of them is written."""


class Published(Protocol):
    """A vector that neighbours may read and change. Whole vector at a time, under its lock."""

    vector: Tensor

    def locked(self) -> AbstractContextManager[None]: ...

    def count(self, writes: int = 0) -> tuple[int, int]:
        """Takes the next number of the vector's history and adds `writes` to its version: (number, version).
        Call under the lock."""

    @property
    def version(self) -> int:
        """How often the vector was written."""


class Gossip(Protocol):
    """The agent that meets this worker's partners in the background."""

    rounds: int
    """Rounds that everybody has played, known after finish()."""

    def credit(self) -> None:
        """The learner has done one more gradient."""

    def finish(self) -> None:
        """The learner has no more work: answer until everybody is done, play to the last common round, stop."""

    def drain(self) -> dict[str, float]:
        """Figures since the last call: meetings, bytes, seconds, pair distance."""


class Roll(Protocol):
    """Who of the whole job is dead; ranks here are ranks of the whole job."""

    def dead(self) -> dict[int, str]:
        """Everybody known to be dead, with the reason."""

    def report(self, rank: int, why: str) -> None:
        """Somebody noticed that a rank is gone."""


class Huddle(Protocol):
    """The learners of one machine around their first. Hand-outs and sums alternate; between two hand-outs every part of the
    vector is added up once, in the same parts and order by all."""

    @property
    def slot(self) -> Tensor | None:
        """Where this member's vector costs no copy: the first one's weights, the others' gradients. None: anywhere."""

    def hand_out(self, x: Tensor) -> None:
        """Rendezvous: x of every member becomes that of the first, who leaves it alone until the sum is there."""

    def add_up(self, x: Tensor) -> Pending:
        """Rendezvous: the first one's x, a part of a whole vector, becomes the sum over all members; what the others' becomes
        is not said."""


class Net(Protocol):
    """One member's view of a group of learners."""

    rank: int
    size: int

    @property
    def ranks(self) -> Sequence[int]:
        """The members' ranks in the whole job."""

    @property
    def store(self) -> Store: ...

    @property
    def roll(self) -> Roll: ...

    def living(self) -> list[int]:
        """Members not known to be dead, as ranks of this group."""

    def start_mean(self, x: Tensor, weight: float | None = None, exact: bool = False) -> Pending:
        """Rendezvous: the weighted mean of everybody's x, which must stay as it is until waited for. A new tensor."""

    def reduce_in_place(self, x: Tensor) -> Pending:
        """Rendezvous: x becomes the sum over all members (native all-reduce); for buckets of gradients."""

    def start_mix(self, x: Tensor, row: dict[int, float]) -> Pending:
        """Rendezvous of neighbours: sum over row of weight * their x, added in rank order. `row` must be symmetric."""

    def cast(self, x: Tensor) -> None:
        """Rendezvous: x of every member becomes that of member 0."""

    def huddle(self, like: Tensor) -> Huddle:
        """Rendezvous: what a machine's learners need to be one worker, for vectors of this length and type."""

    def publish(self, vector: Tensor) -> Published:
        """Rendezvous: a published copy of the vector."""

    def gossip(self, published: Published, matching: Matching, gradients_per_meeting: float) -> Gossip:
        """Start the background meetings of `published`."""

    def add(self, peer: int, d: Tensor) -> int:
        """One-sided: peer's published vector += d. Returns its version before the addition."""

    def get(self, peer: int, out: Tensor) -> int:
        """One-sided: out <- peer's published vector. Returns its version."""

    def part(self, ranks: Sequence[int], name: str) -> Net | None:
        """Rendezvous of the whole group: a net among these members (None for others)."""

    def bytes_sent(self) -> int:
        """Bytes this member has put on its wire, as payload."""

    def close(self) -> None: ...
