"""Loaders: the next pieces of work, claimed and prepared in the background while the current one trains.

One thread runs through the claims, in order, and never further ahead than `depth`; `workers` threads prepare what was claimed;
pieces come out in the order of their claims. The depth begins at two. It grows when the learner had to wait, up to `most`, and
falls again after a long time without waiting: a slow disk gets a longer run-up, and a learner that is slow itself does not
hoard work that others could do. So memory is bounded by `most` batches, whatever the corpus.

What fails in the background is raised where the piece would have come out. Errors of the file system are tried again a few
times first. A loader that is gone without a word is noticed; nothing waits for it for ever.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Generic, TypeVar

from roundelay.errors import DataError, RoundelayError

Claim = TypeVar("Claim")

MIN_DEPTH, MAX_DEPTH = 2, 8
NOTICED = 0.01
"""A wait is one when it took this share of the time since the last piece."""
CALM = 256
"""Pieces without a wait after which the depth falls by one."""
TRIES, PAUSE_S = 3, 0.2
PATIENCE_S = 2.0
LOOK_S = 1.0
"""How often a waiting learner looks whether its loaders live."""


class _Piece(Generic[Claim]):
    def __init__(self, claim: Claim) -> None:
        self.claim, self.claimed = claim, time.perf_counter()
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = False


class PrefetchLoader(Generic[Claim]):
    """Iterating gives (claim, prepare(claim)) for every claim. workers=0 prepares in the learner's own time.

    waited_s    seconds in which a claimed piece was not ready when it was asked for, in all
    last_s      the same of the last piece
    """

    def __init__(
        self,
        claims: Iterable[Claim],
        prepare: Callable[[Claim], Any],
        *,
        workers: int = 1,
        least: int = MIN_DEPTH,
        most: int = MAX_DEPTH,
    ) -> None:
        self._claims, self._prepare, self._workers = claims, prepare, workers
        self._least, self._most = min(least, most), most
        self.depth = self._least
        self.waited_s = self.last_s = 0.0
        self._ahead: deque[_Piece[Claim]] = deque()
        self._to_do: deque[_Piece[Claim]] = deque()
        self._change = threading.Condition()
        self._stopped = self._ended = False
        self._failure: BaseException | None = None
        self._calm = 0
        self._threads: list[threading.Thread] = []

    # -- in the background -----------------------------------------------------------------------------------------

    def _claim_all(self) -> None:
        try:
            claims = iter(self._claims)
            while self._wait_for_room():
                try:
                    piece = _Piece(next(claims))
                except StopIteration:
                    break
                with self._change:
                    self._ahead.append(piece)
                    self._to_do.append(piece)
                    self._change.notify_all()
        except BaseException as error:  # handed to the learner, which raises it
            self._failure = error
        finally:
            with self._change:
                self._ended = True
                self._change.notify_all()

    def _wait_for_room(self) -> bool:
        with self._change:
            self._change.wait_for(lambda: self._stopped or len(self._ahead) < self.depth)
            return not self._stopped

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._stopped or self._to_do or self._ended)
                if self._stopped or not self._to_do:
                    return
                piece = self._to_do.popleft()
            try:
                piece.result = self._patiently(piece.claim)
            except BaseException as error:
                piece.error = error
            with self._change:
                piece.done = True
                self._change.notify_all()

    def _patiently(self, claim: Claim) -> Any:
        """Network file systems have bad moments; bad data stays bad."""
        for left in reversed(range(TRIES)):
            try:
                return self._prepare(claim)
            except OSError as error:
                if not left or self._stopped:
                    raise DataError(
                        f"training data could not be read, {TRIES} times in a row: {error.strerror or error}",
                        where=str(error.filename or claim),
                        hint="check the disk or the network it is on; resume=auto goes on from the last checkpoint",
                    ) from error
                time.sleep(PAUSE_S)
        raise AssertionError("unreachable")

    # -- the learner's side ----------------------------------------------------------------------------------------

    def __iter__(self) -> Generator[tuple[Claim, Any], None, None]:
        if self._workers == 0:
            yield from self._one_by_one()
            return
        self._threads = [threading.Thread(target=self._claim_all, name="sharding", daemon=True)]
        self._threads += [threading.Thread(target=self._work, name=f"loader-{n}", daemon=True) for n in range(self._workers)]
        for thread in self._threads:
            thread.start()
        given = time.perf_counter()
        try:
            while (piece := self._next(given)) is not None:
                if piece.error is not None:
                    raise piece.error
                given = time.perf_counter()
                yield piece.claim, piece.result
                piece.result = None
            if self._failure is not None:
                raise self._failure
        finally:
            self.close()

    def _one_by_one(self) -> Iterator[tuple[Claim, Any]]:
        for claim in self._claims:
            began = time.perf_counter()
            result = self._patiently(claim)
            self.last_s = time.perf_counter() - began
            self.waited_s += self.last_s
            yield claim, result

    def _next(self, given: float) -> _Piece[Claim] | None:
        """The next piece, when it is ready; None at the end."""
        asked = time.perf_counter()
        with self._change:
            while not (self._ahead and self._ahead[0].done):
                if self._ended and not self._ahead:
                    self.last_s = 0.0
                    return None
                self._check_alive()
                self._change.wait(LOOK_S)
            piece = self._ahead.popleft()
            now = time.perf_counter()
            # waiting for a claim is not waiting for a loader: somebody else may still be at work
            self.last_s = max(0.0, now - max(asked, piece.claimed)) if now - asked > 1e-4 else 0.0
            self.waited_s += self.last_s
            self._adapt(self.last_s, now - given)
            self._change.notify_all()
        return piece

    def _adapt(self, waited: float, since: float) -> None:
        if waited > NOTICED * since:
            self.depth, self._calm = min(self.depth + 1, self._most), 0
            return
        self._calm += 1
        if self._calm >= CALM and self.depth > self._least:
            self.depth, self._calm = self.depth - 1, 0

    def _check_alive(self) -> None:
        waiting = bool(self._ahead)
        threads = self._threads[1:] if waiting else self._threads[:1]
        if not any(thread.is_alive() for thread in threads) and not (self._ended and not waiting):
            raise RoundelayError(
                "the loaders of this learner have ended without a word",
                where=f"{len(self._ahead)} pieces were claimed",
                hint="resume=auto goes on from the last checkpoint",
            )

    def close(self) -> None:
        """Nothing more is wanted. Waits for the threads: one at work while the interpreter ends would abort the process."""
        with self._change:
            self._stopped = True
            self._change.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(PATIENCE_S)
        end = getattr(self._prepare, "close", None)
        if end is not None:
            end()
