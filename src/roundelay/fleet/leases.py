"""Leases in the job's store: which rank owns which samples, so that a death at any instruction neither loses nor doubles one.

claimed         counter of the samples that have been claimed
stop-total      samples of a run that was stopped early
returned        spans of ranks that failed or left early, and gaps of an earlier run, which any rank may take
lease/{rank}    spans that the rank owns: `begun` (only this rank trains them) and `ahead` (other ranks may take them over)
done/{rank}/{n} spans that the rank has completed, at most DONE_SPANS per key

Every transition is one compare-and-set that expects the rank's own lease, `stop-total` and `returned`. These keys rarely
change, so conflicts are rare. The counter alone is advanced with `add`: all ranks write it all the time, and a compare-and-set
on it would be repeated once per concurrent claim, which is not linear in the number of ranks. A rank that dies between the
counter and its lease leaves a gap that no lease covers. `recover_gaps` returns it when all live ranks have run out of work.

A compare-and-set is repeated without a limit of its own: each conflict means that another rank has made progress, each call
has the deadline of the store, and a rank that was declared failed gets PeerLost.

The giver-back of a failed rank's spans marks its lease as fenced. All later writes of that rank conflict and raise PeerLost.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from roundelay.core.contracts import Store
from roundelay.errors import PeerLost

Span = tuple[int, int]
CLAIMED, RETURNED, STOP, READY = "claimed", "returned", "stop-total", "sharding-ready"
DONE_SPANS = 64
PAGE = 1000
"""Keys of completed spans that are read in one store call: about 2 MB, far below the longest message of the store."""
SMOOTHING = 0.3
"""Weight of the newest value in the running mean of a duration."""


@dataclass(frozen=True)
class Lease:
    """What one rank owns, as written in the store."""

    begun: tuple[Span, ...] = ()
    ahead: tuple[Span, ...] = ()
    done: int = 0
    """Samples completed."""
    chunk: int = 0
    """Number of the newest key with completed spans."""
    step_s: float = 0.0
    """Seconds of a step of this rank; 0 if unknown."""
    over: bool = False
    """The rank claims no more samples from the counter."""
    fenced: bool = False
    incarnation: int = 0

    @staticmethod
    @lru_cache(maxsize=4096)  # ranks without work read the leases of all ranks again and again; leases are immutable
    def parse(text: str | None) -> Lease:
        fields: dict[str, Any] = json.loads(text) if text else {}
        for name in ("begun", "ahead"):
            fields[name] = parse_spans(fields.get(name, ()))
        return Lease(**fields)

    def text(self) -> str:
        default = asdict(Lease())
        return json.dumps({name: value for name, value in asdict(self).items() if value != default[name]})

    @property
    def idle(self) -> bool:
        """True if the rank owns nothing and claims nothing."""
        return self.fenced or (self.over and not self.begun and not self.ahead)


def parse_spans(spans: Iterable[Sequence[int]]) -> tuple[Span, ...]:
    return tuple((start, stop) for start, stop in spans)


def merge_ranges(spans: Iterable[Span]) -> list[Span]:
    """Return the union of the spans as sorted spans that neither overlap nor touch."""
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def subtract_ranges(spans: Iterable[Span], covered: Iterable[Span]) -> list[Span]:
    """Return the parts of the spans that `covered` does not cover."""
    holes = merge_ranges(covered)
    rest: list[Span] = []
    for start, stop in merge_ranges(spans):
        for a, b in holes:
            if b > start and a < stop:
                if a > start:
                    rest.append((start, a))
                start = b
        if start < stop:
            rest.append((start, stop))
    return rest


class LeaseTable:
    """One rank's access to all leases. Methods block for a round trip to the store; one thread at a time gets through.

    Raises PeerLost in every method that writes if the other ranks have declared this rank failed.
    """

    def __init__(self, store: Store, rank: int, incarnation: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self.store, self.rank, self.incarnation, self._clock = store, rank, incarnation, clock
        self.key = f"lease/{rank}"
        self.lease = Lease(incarnation=incarnation)
        """The latest state that the store has confirmed. Any thread may read it."""
        self.rtt_s = 0.0
        """Running mean of the duration of a store call."""
        self._last: dict[str, str | None] = {self.key: None, STOP: None, RETURNED: None}
        self._done: list[Span] = []
        self._lock = threading.RLock()

    # -- store calls ---------------------------------------------------------------------------------------------------

    def _timed(self, call: Callable[..., Any], *args: Any) -> Any:
        began = self._clock()
        result = call(*args)
        elapsed = self._clock() - began
        self.rtt_s += (elapsed - self.rtt_s) * (SMOOTHING if self.rtt_s else 1.0)
        return result

    def _commit(
        self, values: Mapping[str, str | None], expected: Mapping[str, str | None] | None = None
    ) -> dict[str, Any] | None:
        """Write the values if nothing has changed; otherwise return the current values of all expected keys."""
        conflict = self._timed(self.store.compare_and_set, {**self._last, **(expected or {})}, dict(values))
        self._refresh(values if conflict is None else conflict)
        return conflict

    def _refresh(self, current: Mapping[str, str | None]) -> None:
        """Keep new values of the expected keys. Raises PeerLost if this rank is fenced."""
        self._last.update({key: current[key] for key in self._last if key in current})
        lease = Lease.parse(self._last[self.key])
        if lease.fenced and lease.incarnation >= self.incarnation:
            raise self.fenced_error()
        # an earlier incarnation of this rank was fenced: keep its completed spans
        self.lease = replace(lease, fenced=False, incarnation=self.incarnation, chunk=lease.chunk + lease.fenced)

    def fenced_error(self, reason: str = "no heartbeat") -> PeerLost:
        return PeerLost(
            f"this rank was declared failed by the other ranks ({reason}); its remaining samples were given to them",
            where=f"rank {self.rank}",
            hint="check whether this machine was suspended, overloaded or cut off; continue with resume=auto",
        )

    def read(self, ranks: Collection[int]) -> dict[int, tuple[str | None, Lease]]:
        """Return the leases of other ranks, as text and parsed. One store call."""
        with self._lock:
            texts = self._timed(self.store.get_many, [*self._last, *(f"lease/{rank}" for rank in ranks)])
            self._refresh(texts)
        return {rank: (texts[f"lease/{rank}"], Lease.parse(texts[f"lease/{rank}"])) for rank in ranks}

    @property
    def stop_total(self) -> int | None:
        """Samples of the run if it was stopped early, as of the latest call."""
        text = self._last[STOP]
        return None if text is None else int(text)

    @property
    def returned(self) -> tuple[Span, ...]:
        """Spans that any rank may take, as of the latest call."""
        return parse_spans(json.loads(self._last[RETURNED] or "[]"))

    # -- transitions ---------------------------------------------------------------------------------------------------

    def start(self, first: int, missing_ranges: Sequence[Span]) -> None:
        """Write the first state of the run, unless another rank has done so. All ranks must pass the same arguments."""
        text = json.dumps(list(missing_ranges))
        self.store.compare_and_set({READY: None}, {READY: "1", CLAIMED: str(first), RETURNED: text})
        self._last[RETURNED] = text

    def advance(self, samples: int) -> int:
        """Advance the counter and return its value before. The caller must write the samples into the lease next."""
        return self._timed(self.store.add, CLAIMED, samples) - samples

    def update(
        self,
        completed: Collection[Span] = (),
        begin: Collection[Span] = (),
        claimed: Sequence[Span] = (),
        over: bool = False,
        step_s: float = 0.0,
        publish: Callable[[list[Span]], Mapping[str, str | None]] = lambda begun: {},
    ) -> list[Span]:
        """Complete, begin and claim spans in one write, and return the newly begun ones.

        Spans that another rank has taken over are not begun. `publish` returns keys to write, or to delete (None), for the
        newly begun spans.
        """
        with self._lock:
            while True:
                stop = self.stop_total
                claimed = [(a, min(b, stop)) for a, b in claimed if a < stop] if stop is not None else claimed
                old = self.lease
                ahead = (*old.ahead, *claimed)
                new_begun = [s for s in ahead if s in begin]
                begun = (*(s for s in old.begun if s not in completed), *new_begun)
                finished = [s for s in old.begun if s in completed]
                values: dict[str, str | None] = dict(publish(new_begun))
                chunk, done = old.chunk, self._done
                if finished:
                    chunk, done = (chunk, done + finished) if len(done) < DONE_SPANS else (chunk + 1, finished)
                    done = merge_ranges(done)
                    values[f"done/{self.rank}/{chunk}"] = json.dumps(done)
                new = replace(
                    old,
                    begun=begun,
                    ahead=tuple(s for s in ahead if s not in begin),
                    done=old.done + sum(b - a for a, b in finished),
                    chunk=chunk,
                    over=old.over or over,
                    step_s=float(f"{step_s:.3g}"),
                )
                if replace(new, step_s=old.step_s) == old and not values and self._last[self.key] is not None:
                    return []
                if self._commit({self.key: new.text(), **values}) is None:
                    self._done = done
                    return new_begun

    def take_returned(self, split: Callable[[Span], list[Span]], limit: int) -> list[Span]:
        """Take at most `limit` pieces of the returned spans; none after a stop."""
        with self._lock:
            while (spans := self.returned) and self.stop_total is None:
                pieces = split(spans[0])
                rest = [(pieces[limit][0], spans[0][1])] if len(pieces) > limit else []
                new = replace(self.lease, ahead=(*self.lease.ahead, *pieces[:limit]))
                if self._commit({self.key: new.text(), RETURNED: json.dumps([*rest, *spans[1:]])}) is None:
                    return pieces[:limit]
            return []

    def take_over(self, rank: int, text: str | None, split: Callable[[Span], list[Span]]) -> list[Span]:
        """Take the last span that another rank has not begun, if its lease is still `text`; otherwise return []."""
        with self._lock:
            other = Lease.parse(text)
            while other.ahead and not other.fenced:
                pieces = split(other.ahead[-1])
                new = replace(self.lease, ahead=(*self.lease.ahead, *pieces))
                less = replace(other, ahead=other.ahead[:-1])
                key = f"lease/{rank}"
                conflict = self._commit({self.key: new.text(), key: less.text()}, {key: text})
                if conflict is None:
                    return pieces
                if conflict[key] != text:
                    return []
            return []

    def give_back(self, rank: int) -> None:
        """Return all spans of a failed rank and fence it, unless that has been done."""
        with self._lock:
            key = f"lease/{rank}"
            text = self._timed(self.store.get, key)
            while not (lease := Lease.parse(text)).fenced:
                fenced = replace(lease, begun=(), ahead=(), fenced=True).text()
                returned = merge_ranges([*self.returned, *lease.begun, *lease.ahead])
                conflict = self._commit({key: fenced, RETURNED: json.dumps(returned)}, {key: text})
                if conflict is None:
                    return
                text = conflict[key]

    def give_up(self) -> None:
        """Return all spans that this rank owns, and claim no more: it leaves before the end of the run. One compare-and-set."""
        with self._lock:
            while True:
                old = self.lease
                values: dict[str, str | None] = {self.key: replace(old, begun=(), ahead=(), over=True).text()}
                if owned := [*old.begun, *old.ahead]:
                    values[RETURNED] = json.dumps(merge_ranges([*self.returned, *owned]))
                if self._commit(values) is None:
                    return

    def recover_gaps(self, leases: Mapping[int, tuple[str | None, Lease]], spans: Sequence[Span]) -> bool:
        """Return the parts of `spans` that no rank has completed, if all the leases are idle and unchanged.

        Those are samples whose rank died between the counter and its lease. Returns True if there is something to take now.
        """
        with self._lock:
            gaps = subtract_ranges(spans, self.completed())
            if not gaps:
                return bool(self.returned)
            texts = {f"lease/{rank}": text for rank, (text, _) in leases.items()}
            self._commit({RETURNED: json.dumps(gaps)}, texts)
            return True

    def completed(self, ranks: Collection[int] | None = None) -> list[Span]:
        """Return the spans that some ranks, or all, have completed, merged. One store call and one per PAGE keys."""
        if ranks is None:
            leases = self._timed(self.store.list, "lease/")
        else:
            leases = self._timed(self.store.get_many, [f"lease/{rank}" for rank in ranks])
        keys = [
            f"done/{key.removeprefix('lease/')}/{chunk}"
            for key, text in leases.items()
            for chunk in range(Lease.parse(text).chunk + 1)
        ]
        spans: list[Span] = []
        for start in range(0, len(keys), PAGE):
            texts = self._timed(self.store.get_many, keys[start : start + PAGE])
            spans = merge_ranges([*spans, *(s for text in texts.values() if text for s in parse_spans(json.loads(text)))])
        return spans
