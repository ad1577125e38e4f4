"""Sharding: which rank trains on which samples.

static    round r covers indices r B to (r+1) B of the epoch, in rank order; a rank without samples takes part with weight 0
dynamic   a rank leases the next indices from a counter in the job's store, ahead of time; leases of failed ranks are returned,
          and at the end idle ranks take over leases that slow ranks have not begun (`roundelay.fleet.leases`)

Indices count global samples over all epochs: index p belongs to epoch p // samples. Both forms assign every index of an epoch
exactly once. Both can start at any index, so a resumed run continues at its checkpoint, with any number of ranks.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence

from roundelay.core.contracts import Store
from roundelay.engine.node_leases import NodeLeases
from roundelay.engine.shard_plan import BatchLease, ShardPlan, StaticSharding, uncovered_ranges
from roundelay.fleet.leases import CLAIMED, RETURNED, STOP, Lease, LeaseTable, Span, merge_ranges
from roundelay.strategies.step import StepInfo

__all__ = [
    "BatchLease", "DynamicSharding", "ShardPlan", "Span", "StaticSharding", "merge_ranges", "uncovered_ranges",
]  # fmt: skip

POLL_S, LONG_POLL_S = 0.01, 0.05
"""Seconds between two polls of a rank without work, at first and after a while."""
MAX_AHEAD = 64
"""Batches that a rank owns and has not begun, or has begun in advance, at most."""
SYNCHRONOUS_SHARE, SYNCHRONOUS_S = 0.02, 5e-5
"""The learner begins leases itself if a store call takes at most this share of a step, or this time."""
UNKNOWN_STEP_RTT_S = 2e-3
"""Before the first step, a store call that takes longer than this counts as slow."""
WATCHED = 8
"""Busy ranks whose leases a rank without work reads at once."""


class DynamicSharding:
    """Lease batches through the store. In a hierarchy the node leader leases for all ranks of its machine.

    Iterate in one thread (the loader's). In the thread that trains, call `begin` before each batch and skip the batch if it
    returns False, and call `complete` after it. If store calls take long compared with a step, a thread of this object claims,
    begins and completes leases in bulk, so that the training thread makes no store call. Otherwise `begin` makes one.
    """

    def __init__(
        self,
        plan: ShardPlan,
        store: Store,
        missing_ranges: Sequence[Span] = (),
        stays: bool = True,
        failed: Callable[[], Collection[int]] = tuple,
        clock: Callable[[], float] = time.perf_counter,
        incarnation: int = 0,
    ) -> None:
        """Store nothing yet. All ranks must pass the same plan and missing ranges.

        missing_ranges   ranges before `plan.first` that still have to be done
        stays            a rank without work waits for leases that a failed rank may leave, and takes over those of slow ranks
        failed           returns the ranks that have failed so far; must not block
        """
        self.plan, self.store, self.stays, self._failed, self._clock = plan, store, stays, failed, clock
        self.missing_ranges = list(missing_ranges)
        self.leader = plan.machine[0]
        self.table = LeaseTable(store, plan.rank, incarnation, clock)
        self.step_s = 0.0
        """Running mean of the seconds from `begin` to `complete`; 0 before the first."""
        self._size = sum(plan.batches[rank] for rank in plan.machine)
        self._hierarchical = len(plan.machine) > 1
        self._change = threading.Condition()
        self._write_lock = threading.RLock()
        self._unyielded: deque[Span] = deque()
        self._completed: list[Span] = []
        self._started: Span | None = None
        self._started_at = 0.0
        self._waiting_for: Span | None = None
        self._claimed = plan.first
        self._exhausted = self._closed = self._stop_written = False
        self._fenced_ranks: set[int] = set()
        self._busy: list[int] = []
        self.node = NodeLeases(store, self.leader)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    # -- the learner's thread ------------------------------------------------------------------------------------------

    def begin(self, lease: BatchLease) -> bool:
        """Return True if this rank may train the lease now, or False if another rank has taken it over.

        Blocks for a round trip to the store if store calls are fast compared with a step, and otherwise only if the
        background thread is late. Raises PeerLost if this rank was declared failed.
        """
        span = lease.span
        if not self._hierarchical:
            with self._change:
                if span in self._completed:  # lost, returned and done again, and its completion is not written yet
                    return False
            if span in self.table.lease.ahead:
                if self._calls_are_slow():
                    self._wait_for_thread(span)
                else:
                    self._write(begin=[span])
            if span not in self.table.lease.begun:
                return False
        with self._change:
            self._started, self._started_at = span, self._clock()
            self._change.notify_all()
        return True

    def complete(self, span: Span) -> None:
        """Release a lease: its samples have been applied to w. Does not block if store calls are slow.

        The completion is written with the next write of this rank. If the rank dies before, another rank repeats the samples.
        """
        with self._change:
            if span == self._started:
                elapsed = self._clock() - self._started_at
                self.step_s += (elapsed - self.step_s) * (0.3 if self.step_s else 1.0)
                self._started = None
            self._completed.append(span)
            self._change.notify_all()
        if self._exhausted and self._thread is None:  # wakes the iterating thread
            self._write()

    def _calls_are_slow(self) -> bool:
        """Return True if leases are kept in the background; start the thread when that becomes necessary."""
        if self._thread is None and not self._closed:
            rtt_s, step_s = self.table.rtt_s, self.step_s
            slow = rtt_s > max(SYNCHRONOUS_S, SYNCHRONOUS_SHARE * step_s) if step_s else rtt_s > UNKNOWN_STEP_RTT_S
            if slow:
                self._thread = threading.Thread(target=self._keep, name="lease-keeper", daemon=True)
                self._thread.start()
        return self._thread is not None and not self._closed

    def _wait_for_thread(self, span: Span) -> None:
        with self._change:
            self._waiting_for = span
            self._change.notify_all()
            while span in self.table.lease.ahead and self._error is None and not self._closed:
                self._change.wait(1.0)
            self._waiting_for = None
        if self._error is not None:
            raise self._error
        if span in self.table.lease.ahead:
            self._write(begin=[span])

    def stop(self) -> None:
        """End the run early: no rank leases samples beyond those leased by now."""
        if not self._stop_written:
            self.store.claim(STOP, self.store.get(CLAIMED) or str(self.plan.first))
            self._stop_written = True

    def give_up(self) -> None:
        """Return the leases that this rank has not completed, and claim no more: it leaves before the end of the run.

        Without it other ranks would wait for them. Does nothing at the end of the run. Blocks for at most three store calls.
        In a hierarchy the node leader does this for its machine, whose ranks must leave at the same batch.
        """
        with self._change:
            self._closed = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join()
        with self._write_lock:
            if self.plan.rank != self.leader or self.table.lease.idle:
                return
            self._write()
            self.table.give_up()
            if self._hierarchical:
                self.node.end()

    @property
    def total(self) -> int:
        """Global samples of the run, or of the part before `stop`."""
        stop = self.store.get(STOP)
        return self.plan.total if stop is None else min(self.plan.total, int(stop))

    def empty_step(self) -> StepInfo:
        """Return the step info of a step without samples at the end of the run."""
        total = self.total
        return self.plan.step_info(0, 0, self.plan.global_batch, total, total)

    def completed_by_failed(self) -> list[Span]:
        """Return the samples that failed ranks had completed, as merged spans. Two store calls at most.

        A sample counts if its completion was written to the store. Its update had been applied to the failed rank's weights
        by then, and reached other ranks through the exchanges that followed. The update of its very last steps may not
        have been exchanged.
        """
        return self.completed_by(set(self._failed()))

    def completed_by(self, ranks: Collection[int]) -> list[Span]:
        """Return the samples that some ranks have completed, as merged spans."""
        return self.table.completed(ranks) if ranks else []

    # -- writing ---------------------------------------------------------------------------------------------------------

    def _write(self, begin: Collection[Span] = (), claimed: Sequence[Span] = (), over: bool = False) -> None:
        """Write what has changed to the store, completions included, in one call."""
        with self._write_lock:
            with self._change:
                completed = list(self._completed)
            if self._hierarchical:  # begun at once: all ranks of the machine must agree on what they train
                begun = self.table.update(completed, [*begin, *claimed], claimed, over, self.step_s, self.node.values_of)
                self.node.published += len(begun)
            else:
                begun = self.table.update(completed, begin, claimed, over, self.step_s)
            with self._change:
                del self._completed[: len(completed)]
                owned = (*begun, *self.table.lease.ahead)
                self._unyielded.extend(begun if self._hierarchical else (span for span in claimed if span in owned))
                self._change.notify_all()

    def _adopt(self, spans: list[Span]) -> None:
        """Yield spans that came from other ranks."""
        if self._hierarchical:
            self._write(spans)
            return
        with self._change:
            self._unyielded.extend(spans)
            self._change.notify_all()

    def _claim(self, batches: int, begin: Callable[[], Collection[Span]] = tuple) -> None:
        """Claim returned spans, or the next batches of the counter."""
        with self._write_lock:
            if self._closed:
                return
            self._give_back()
            if spans := self.table.take_returned(self._split, batches):
                self._adopt(spans)
                return
            start = self.table.advance(batches * self._size)
            self._claimed = start + batches * self._size
            end = min(self._claimed, self.plan.total)
            self._write(begin(), self._split((start, end)))
            stop = self.table.stop_total
            self._exhausted = start >= (self.plan.total if stop is None else min(stop, self.plan.total))

    def _give_back(self) -> None:
        """Return the leases of newly failed ranks. Raises PeerLost if this rank is one of them."""
        failed = self._failed()
        if not failed:
            return
        if self.plan.rank in failed:
            reasons = dict(failed) if isinstance(failed, dict) else {}
            raise self.table.fenced_error(str(reasons.get(self.plan.rank, "no heartbeat")))
        for rank in sorted(set(failed) - self._fenced_ranks):
            self.table.give_back(rank)
            self._fenced_ranks.add(rank)

    def _split(self, span: Span) -> list[Span]:
        """Split a span into batches, each in one epoch."""
        pieces, (start, stop) = [], span
        while start < stop:
            end = min(stop, start + self._size, (start // self.plan.samples + 1) * self.plan.samples)
            pieces.append((start, end))
            start = end
        return pieces

    def _batches_at_once(self, wanted: int) -> int:
        """Return how many batches to claim: fewer near the end, so that the last ones are spread over all ranks."""
        share = (self.plan.total - self._claimed) // (2 * len(self.plan.node_leaders) * self._size)
        return max(1, min(wanted, share, MAX_AHEAD))

    # -- the background thread -------------------------------------------------------------------------------------------

    def _lead_s(self) -> float:
        """Return how long before its start a batch must be begun: two turns of this thread, of two calls each."""
        return 4 * self.table.rtt_s + 0.002

    def _due(self) -> tuple[list[Span], float]:
        """Return the spans to begin now, and the seconds until the next is due."""
        lease, step_s, lead_s = self.table.lease, self.step_s, self._lead_s()
        with self._change:
            started, completed, waiting = self._started, set(self._completed), self._waiting_for
            now = self._clock()
            next_start = max(now, self._started_at + step_s) if started else now
        ready = sum(span != started and span not in completed for span in lease.begun)
        if not step_s:
            return list(lease.ahead[: max(0, 1 - ready - (started is not None))]), 0.05
        due: list[Span] = []
        wait_s = 1.0
        for number, span in enumerate(lease.ahead[: max(0, MAX_AHEAD - ready)]):
            wait_s = next_start + (ready + number) * step_s - lead_s - now
            if wait_s > 0 and span != waiting:
                break
            due.append(span)
        return due, max(wait_s, 0.001)

    def _keep(self) -> None:
        """Claim, begin and complete leases until the iteration ends."""
        try:
            while not self._closed:
                begin, wait_s = self._due()
                wanted = min(MAX_AHEAD, math.ceil(2 * self._lead_s() / (self.step_s or 0.05)) + 3)
                missing = wanted - len(self.table.lease.ahead)
                if not self._exhausted and missing > wanted // 3:
                    self._claim(self._batches_at_once(missing), lambda: self._due()[0])
                elif begin or len(self._completed) > MAX_AHEAD or (self._completed and self._exhausted):
                    self._write(begin)
                else:
                    with self._change:
                        if self._waiting_for not in self.table.lease.ahead:
                            self._change.wait(min(wait_s, 0.25))
        except BaseException as error:  # raised by `begin` and by the iterator
            self._error = error
        finally:
            with self._change:
                self._change.notify_all()

    # -- the loader's thread -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[BatchLease]:
        self.table.start(self.plan.first, self.missing_ranges)
        if self.plan.rank != self.leader:
            yield from map(self._lease, self.node.follow(self.plan.rank, self._failed))
            return
        try:
            while (span := self._next_span()) is not None:
                yield self._lease(span)
            if self._hierarchical:
                self.node.end()
        finally:
            with self._change:
                self._closed = True
                self._change.notify_all()

    def _next_span(self) -> Span | None:
        """Return the next span of this rank; wait for one. Returns None at the end of the run."""
        poll_s = POLL_S
        while not self._closed:
            if self._error is not None:
                raise self._error
            with self._change:
                while self._unyielded:
                    span = self._unyielded.popleft()
                    if self._hierarchical or span in self.table.lease.ahead or span in self.table.lease.begun:
                        return span
                if self._thread is not None and not self._exhausted and self._error is None:
                    self._change.wait(LONG_POLL_S)
                    continue
            if not self._exhausted:
                slow = self.table.rtt_s > max(SYNCHRONOUS_S, SYNCHRONOUS_SHARE * self.step_s)
                bulk = math.ceil(2 * self._lead_s() / self.step_s) + 2 if self.step_s and slow else 1
                self._claim(self._batches_at_once(bulk) if self._hierarchical else 1)
                continue
            watched = self._find_work()
            if watched is None:
                return None
            if not self._unyielded:
                self.store.pause(poll_s, *watched, self.table.key, RETURNED, "failures")
                poll_s = min(LONG_POLL_S, poll_s * 1.2)
        return None

    def _find_work(self) -> list[str] | None:
        """Take spans of failed and slow ranks, when the counter is exhausted.

        Return the keys whose change may bring work, or None if this rank may leave.
        """
        with self._write_lock:
            self._give_back()
            self._write(over=True)
            table, plan = self.table, self.plan
            if not self.stays:  # a failure ends the job anyway, and other ranks may be waiting in a collective
                return None if table.lease.idle else []
            if table.lease.ahead:
                return []
            ranks = [rank for rank in plan.node_leaders if rank != plan.rank]
            # after the first look at all ranks, look only at some that were busy then: idle ranks rarely become busy again
            leases = table.read(self._busy[-WATCHED:] or ranks)
            if spans := table.take_returned(self._split, 1) or self._take_over(leases):
                self._adopt(spans)
                return []
            looked_at_all = not self._busy
            busy = [rank for rank, (_, lease) in leases.items() if not lease.idle and rank not in self._fenced_ranks]
            self._busy = busy if looked_at_all else [*self._busy[:-WATCHED], *busy]
            if busy or not table.lease.idle:
                return [f"lease/{rank}" for rank in busy[-1:]]
            if not looked_at_all:
                return self._find_work()
            fenced = self._fenced_ranks or any(lease.fenced for _, lease in leases.values())  # by this rank or another one
            if table.stop_total is not None or not fenced:
                return None
            everything = [*self.missing_ranges, (plan.first, plan.total)]
            return [] if table.recover_gaps(leases, everything) else None

    def _take_over(self, leases: dict[int, tuple[str | None, Lease]]) -> list[Span]:
        """Take a span that a slower rank has not begun, if this rank can finish it before that rank would."""
        own, mine = self.plan.rank, len(self.table.lease.begun) + 1

        def remaining_s(rank: int) -> float:
            lease = leases[rank][1]
            return (len(lease.begun) + len(lease.ahead)) * (lease.step_s if self.step_s and lease.step_s else 1.0)

        def own_s(rank: int) -> float:
            return mine * (self.step_s if self.step_s and leases[rank][1].step_s else 1.0)

        # strictly earlier: otherwise two ranks would take the same span from each other again and again
        candidates = [rank for rank, (_, lease) in leases.items() if lease.ahead and own_s(rank) < remaining_s(rank)]
        for rank in sorted(candidates, key=lambda rank: (-remaining_s(rank), (rank - own) % len(self.plan.batches))):
            if spans := self.table.take_over(rank, leases[rank][0], self._split):
                return spans
        return []

    def _lease(self, span: Span) -> BatchLease:
        plan = self.plan
        start, stop = span
        epoch = start // plan.samples
        first = min(stop, start + sum(plan.batches[r] for r in plan.machine if r < plan.rank))
        end = min(stop, first + plan.batches[plan.rank])
        info = plan.step_info(end - first, stop - start, plan.global_batch, start, plan.total)
        return BatchLease(epoch, first - epoch * plan.samples, end - epoch * plan.samples, info, span)
