"""The final average: the mean of the weights of all live learners, repeated without the members that fail meanwhile.

Attempt n has its own keys in the store, all below closing/n:

members     the ranks of the attempt, claimed by the first rank that gets there
arrived/r   rank r takes part; the last one sets start, so that a frozen rank blocks no other rank in the collective. The value
            lists the partners that r cannot reach
method      "collective", or "tree" if two members cannot reach each other: a mean over a tree that goes around them
ok/r        the collective ended well on rank r
verdict     "ok" if it ended well on all live members, else "retry"; claimed by the first rank that knows

All members follow the claimed verdict, so no rank can end with another mean than the rest. Every attempt contributes the same
vectors.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from torch import Tensor

from roundelay.comm.torch_backend import TorchCommunicator
from roundelay.comm.tree_average import Unreachable
from roundelay.core.contracts import Communicator, Work
from roundelay.core.wait import store_sleep, wait_until
from roundelay.errors import PeerLost
from roundelay.fleet.membership import FAILURES

if TYPE_CHECKING:
    from roundelay.engine.learner import Learner

SILENT_S = 15.0
"""Longest time without progress in the collective of a repeated attempt; gloo cannot be aborted."""
SLOWEST_BYTES_PER_S = 16_000.0
"""A collective on a link of this speed still counts as alive."""
POLL_S = 0.1
"""Longest time between two looks at the store; a change of the awaited key ends it at once."""
WORK_POLL_S = 0.005
"""Time between two looks at a collective, without a store call."""
EXTRA_ATTEMPTS = 2
"""Attempts beyond one per member: for connections that broke although no rank failed."""

logger = logging.getLogger(__name__)


def average_once(comm: Communicator, vectors: list[Tensor], deterministic: bool) -> list[Tensor]:
    """Return the means of the vectors over all ranks of `comm`. Collective; for strategies that end with the first failure."""
    return [comm.all_reduce_mean(v, None, deterministic).wait() if v.numel() else v for v in vectors]


class ClosingAverage:
    """The final average of one learner, for strategies that survive failures. For the thread of the learner, used once."""

    def __init__(self, learner: Learner, vectors: list[Tensor]) -> None:
        self.learner, self.comm, self.store = learner, learner.worker.comm, learner.job.store
        self.vectors = [v.clone() for v in vectors]
        self.timeout_s = learner.options.timeout_s
        self.rank = self.comm.rank
        self._index = {rank: member for member, rank in enumerate(self.comm.ranks)}
        self._collective_failed = False
        """The collective of the last attempt failed although no member did: the network between two of them may be broken."""

    def run(self) -> list[Tensor]:
        """Return the means over the members of the first attempt that ended well. Blocks until all members agree.

        Raises PeerLost if this rank has been declared failed, or if the last attempt failed too.
        """
        members = list(range(self.comm.size))
        absent: set[int] = set()
        for attempt in range(self.comm.size + EXTRA_ATTEMPTS):
            excluded = self._failed() | (absent - {self.rank})
            members = [m for m in members if m not in excluded]
            members = json.loads(self.store.claim(f"closing/{attempt}/members", json.dumps(members)))
            if self.rank not in members:
                raise self._fenced()
            absent = self._arrive(attempt, members)
            means = self._reduce(attempt, members) if not absent else None
            if self._agree(attempt, members, means is not None):
                if means is None:
                    raise self._fenced()
                return means
            logger.info("final average: attempt %d failed and is repeated with the remaining ranks", attempt + 1)
        raise PeerLost(
            f"the final average failed {self.comm.size + EXTRA_ATTEMPTS} times",
            where=f"rank {self.learner.rank}",
            hint="look at the logs of the other ranks; continue with resume=auto",
        )

    def _failed(self) -> set[int]:
        """Return the failed members, as ranks of the communicator. One store call."""
        return {self._index[rank] for rank in self.comm.membership.failed_ranks() if rank in self._index}

    def _failed_at_last_heartbeat(self) -> set[int]:
        """Return the members whose failure this rank has read. No store call."""
        return {self._index[rank] for rank in self.comm.membership.cached if rank in self._index}

    def _wait(self, predicate: Callable[[], bool], awaited: Collection[int] | None, key: str) -> bool:
        """Poll `key` for at most `timeout_s`, or until a rank of `awaited` has failed; return the predicate's last value."""
        return wait_until(
            predicate,
            self.timeout_s,
            failures=self._failed if awaited is not None else None,
            awaited=awaited,
            poll_s=POLL_S,
            clock=self.learner.context.runtime.clock,
            sleep=store_sleep(self.store, FAILURES, key),
        )

    def _arrive(self, attempt: int, members: list[int]) -> set[int]:
        """Wait for all members; return the failed ones, or if none has failed those that did not come within `timeout_s`."""
        keys, start = {m: f"closing/{attempt}/arrived/{m}" for m in members}, f"closing/{attempt}/start"
        self.store.set(keys[self.rank], json.dumps(self.comm.silent_peers()))
        if self.store.add(f"closing/{attempt}/arrived", 1) == len(members):
            self.store.set(start, "1")
        if self._wait(lambda: self.store.get(start) is not None, members, start):
            return set()
        arrived = self.store.get_many(list(keys.values()))
        return (self._failed() & set(members)) or {m for m in members if arrived[keys[m]] is None}

    def _method(self, attempt: int, members: list[int]) -> str:
        """Return how the members average in this attempt; all of them get the same answer."""
        notes = self.store.get_many([f"closing/{attempt}/arrived/{m}" for m in members])
        broken = any(set(json.loads(text)) & set(members) for text in notes.values() if text is not None)
        return self.store.claim(f"closing/{attempt}/method", "tree" if broken or self._collective_failed else "collective")

    def _reduce(self, attempt: int, members: list[int]) -> list[Tensor] | None:
        """Average the vectors over `members`; return None if that failed."""
        if len(members) == 1:
            return self.vectors
        try:
            if isinstance(self.comm, TorchCommunicator) and self._method(attempt, members) == "tree":
                return self.comm.mean_around_broken_links(self.vectors, members, f"closing/{attempt}/tree")
            return self._all_reduce(attempt, members)
        except Unreachable as error:  # the other ranks need not wait for this one
            self.comm.membership.report(self.comm.ranks[self.rank], "it cannot reach the other ranks for the final average")
            raise error
        except PeerLost as error:
            logger.info("final average, attempt %d: %s", attempt + 1, error.message)
            self._collective_failed = not self._failed() & set(members)
            return None

    def _all_reduce(self, attempt: int, members: list[int]) -> list[Tensor]:
        """Average the vectors by the backend's collective, on a new group if it is not the first attempt."""
        comm = self.comm
        if len(members) < comm.size or attempt > 0:
            group = comm.new_group(members, f"closing-{attempt}", min(self.timeout_s, SILENT_S))
            assert group is not None
            self.learner.communicators.append(group)
            comm = group
        means = []
        for vector in self.vectors:
            if vector.numel():
                work = comm.all_reduce_mean(vector, None, self.learner.options.deterministic_reduce)
                limit_s = self.timeout_s + 2 * vector.numel() * vector.element_size() / SLOWEST_BYTES_PER_S
                self._wait_for_work(comm, work, members, limit_s)
                means.append(work.wait())
            else:
                means.append(vector)
        return means

    def _wait_for_work(self, comm: Communicator, work: Work, members: list[int], limit_s: float) -> None:
        """Block until a gloo collective is complete; raise PeerLost once a member is reported as failed. Others report it."""
        if isinstance(comm, TorchCommunicator):
            wait_until(
                lambda: work.done,
                limit_s,
                lambda: PeerLost("a member failed during the collective", where=f"rank {self.learner.rank}"),
                failures=self._failed_at_last_heartbeat,
                awaited=members,
                poll_s=WORK_POLL_S,
            )

    def _agree(self, attempt: int, members: list[int], ok: bool) -> bool:
        """Post how the attempt ended here and return the verdict of all members."""
        verdict = f"closing/{attempt}/verdict"
        if not ok:
            self.store.claim(verdict, "retry")
        else:
            self.store.set(f"closing/{attempt}/ok/{self.rank}", "1")
            if self.store.add(f"closing/{attempt}/ok", 1) == len(members):
                self.store.claim(verdict, "ok")

        def decided() -> bool:
            if self.store.get(verdict) is not None:
                return True
            failed = self._failed()
            if not failed:
                return False
            oks = self.store.get_many([f"closing/{attempt}/ok/{m}" for m in members if m not in failed])
            if all(text is not None for text in oks.values()):
                self.store.claim(verdict, "ok")
                return True
            return False

        if not self._wait(decided, None, verdict):
            self.store.claim(verdict, "retry")
        return self.store.get(verdict) == "ok"

    def _fenced(self) -> PeerLost:
        why = self.comm.membership.failed_ranks().get(self.learner.rank, "it did not arrive in time")
        return PeerLost(
            f"this rank was declared failed by the other ranks ({why}); they finished without it",
            where=f"rank {self.learner.rank}",
            hint="check whether this machine was suspended or overloaded; continue with resume=auto",
        )
