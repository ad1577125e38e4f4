"""Votes: all ranks start or none.

Each rank writes its verdict; the first rank that has seen enough decides, by an atomic claim of one key, and every rank obeys
that decision. So all ranks raise the same error, even if some of them were late.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable

from roundelay.core.contracts import Store
from roundelay.core.wait import wait_until
from roundelay.errors import DataError, PeerLost, RoundelayError, UsageError
from roundelay.fleet.membership import FAILURES, StoreMembership

OK = "ok"
GRACE_S = 2.0
"""After the first vote against, the votes of the other ranks are awaited for this long."""
LISTED = 8
"""Different messages that a merged error lists."""
KINDS: dict[str, type[RoundelayError]] = {kind.__name__: kind for kind in (UsageError, DataError, PeerLost, RoundelayError)}
"""Kinds of errors, in the order in which they win."""


def poll_interval(size: int) -> float:
    """Return the seconds between two polls of a rank: the polls of all ranks together stay below 500 per second."""
    return max(0.005, size / 500)


def gather(
    store: Store,
    prefix: str,
    ranks: Iterable[int],
    rank: int,
    membership: StoreMembership,
    timeout_s: float,
    *,
    doing: str,
    on_arrival: Callable[[int, str], None] = lambda rank, text: None,
    vote_name: str = "",
    clock: Callable[[], float] = time.monotonic,
) -> dict[int, str]:
    """Block until every one of `ranks` has written `prefix` + rank; return the values by rank. One store call per poll.

    `on_arrival` is called with each value as it arrives and may raise. Raises PeerLost if an awaited rank fails or does not
    write within `timeout_s`, and the error of the vote `vote_name` as soon as that has been decided against.
    """
    values: dict[int, str] = {}
    missing = set(ranks)
    every = poll_interval(len(missing))
    result_key = f"vote/{vote_name}/result"
    last_failure: list[str | None] = [""]

    def poll() -> bool:
        keys = {f"{prefix}{r}": r for r in sorted(missing)}
        answer = store.get_many([result_key, FAILURES, *keys])
        decision = answer[result_key]
        if vote_name and decision is not None and (against := decided_error(decision)) is not None:
            raise against
        for key, r in keys.items():
            if (text := answer[key]) is not None:
                values[r] = text
                missing.discard(r)
                on_arrival(r, text)
        if missing and answer[FAILURES] != last_failure[0]:
            if (lost := membership.error(sorted(missing), rank, doing)) is not None:
                raise lost
            last_failure[0] = answer[FAILURES]
        return not missing

    def error() -> PeerLost:
        listed = ", ".join(map(str, sorted(missing)))
        return PeerLost(
            f"rank {listed} did not connect within {timeout_s:.0f} s",
            where=f"rank {rank}, {doing}",
            hint="check its log, and that all ranks have the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE",
        )

    def sleep(_: float) -> None:
        # one missing key suffices: with all of them each arrival would wake every rank
        store.pause(every, FAILURES, result_key, f"{prefix}{max(missing)}")

    wait_until(poll, timeout_s, error, clock=clock, sleep=sleep)
    return values


def vote(
    store: Store,
    name: str,
    rank: int,
    size: int,
    error: RoundelayError | None,
    membership: StoreMembership,
    timeout_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Vote for (None) or against (an error); return on all ranks if all have voted for, otherwise raise the same error on all.

    Collective: blocks until a decision, at most about `timeout_s`. A rank that fails or does not vote in time votes against.
    """
    prefix = f"vote/{name}/"
    if size == 1:
        if error is not None:
            raise error
        return
    store.set(f"{prefix}{rank}", OK if error is None else json.dumps(_as_dict(error)))
    verdicts: dict[int, str] = {}
    against_at: list[float] = []
    deadline = clock() + timeout_s

    def poll() -> str | None:
        """Return the decision, or None."""
        missing = [r for r in range(size) if r not in verdicts]
        answer = store.get_many([f"{prefix}result", FAILURES, *(f"{prefix}{r}" for r in missing)])
        if (result := answer[f"{prefix}result"]) is not None:
            return result
        verdicts.update({r: text for r in missing if (text := answer[f"{prefix}{r}"]) is not None})
        refusals = {r: text for r, text in verdicts.items() if text != OK}
        if refusals and not against_at:
            against_at.append(clock())
        if len(verdicts) == size or (refusals and clock() - against_at[0] > GRACE_S):
            return store.claim(f"{prefix}result", _merge(refusals) if refusals else OK)
        awaited = [r for r in range(size) if r not in verdicts]
        if answer[FAILURES] is not None and (lost := membership.error(awaited, rank, f"vote '{name}'")) is not None:
            return store.claim(f"{prefix}result", _merge(refusals) if refusals else json.dumps(_as_dict(lost)))
        if clock() > deadline:
            late = PeerLost(
                f"rank {', '.join(map(str, awaited))} did not vote on '{name}' within {timeout_s:.0f} s",
                where=f"rank {rank}",
                hint="look at its log; raise timeout_s if it starts slowly",
            )
            return store.claim(f"{prefix}result", _merge(refusals) if refusals else json.dumps(_as_dict(late)))
        return None

    def sleep(_: float) -> None:
        store.pause(poll_interval(size), FAILURES, f"{prefix}result")

    decision = wait_until(poll, math.inf, clock=clock, sleep=sleep)  # poll() decides after `timeout_s`
    assert decision is not None
    if (against := decided_error(decision)) is not None:
        raise against


def decided_error(decision: str) -> RoundelayError | None:
    """Return the error of a decision against, or None if it was for."""
    if decision == OK:
        return None
    note = json.loads(decision)
    return KINDS[note["kind"]](note["message"], where=note["where"], hint=note["hint"])


def _as_dict(error: RoundelayError) -> dict[str, str]:
    kind = next(name for name, kind in KINDS.items() if isinstance(error, kind))
    return {"kind": kind, "message": error.message, "where": error.where, "hint": error.hint}


def _merge(against: dict[int, str]) -> str:
    """Return one error for all votes against: of the gravest kind, each different message once."""
    notes = {r: json.loads(text) for r, text in sorted(against.items())}
    kind = next(name for name in KINDS if any(note["kind"] == name for note in notes.values()))
    notes = {r: note for r, note in notes.items() if note["kind"] == kind}
    first = notes[min(notes)]
    return json.dumps(
        {
            "kind": kind,
            "message": _joined(note["message"] for note in notes.values()),
            "where": _joined(note["where"] for note in notes.values()),
            "hint": first["hint"],
        }
    )


def _joined(texts: Iterable[str]) -> str:
    """Return the different texts, at most LISTED of them."""
    unique = list(dict.fromkeys(text for text in texts if text))
    return "; ".join(unique[:LISTED]) + (f"; and {len(unique) - LISTED} more" if len(unique) > LISTED else "")


def refuse(store: Store, name: str, error: RoundelayError) -> RoundelayError:
    """Decide a vote against before this rank has voted, so that no rank waits for it; return the error to raise.

    That is the error of an earlier decision, if there is one. Without effect if the store is lost.
    """
    try:
        return decided_error(store.claim(f"vote/{name}/result", json.dumps(_as_dict(error)))) or error
    except PeerLost:
        return error
