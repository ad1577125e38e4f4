"""Suspicion: a peer that makes no progress is passed over for a while. Local, cheap and reversible; it declares no failure.

Pure: the time is an argument. A peer is suspected SUSPECT_S after the last progress of an exchange that is open with it, or at
once when its connection breaks. Attempts to reach it again follow a back-off. Progress of any kind ends the suspicion.
"""

from __future__ import annotations

SUSPECT_S = 3.0
"""An open exchange without progress for this time makes its partner suspected."""
RETRY_S, MAX_RETRY_S = 0.5, 8.0
"""Back-off between two attempts to reach a suspected peer: it doubles from the first value to the second."""


class Suspicion:
    """The suspected peers of one rank. Belongs to one thread. No method blocks."""

    def __init__(self, suspect_s: float = SUSPECT_S, retry_s: float = RETRY_S, max_retry_s: float = MAX_RETRY_S) -> None:
        self._suspect_s, self._retry_s, self._max_retry_s = suspect_s, retry_s, max_retry_s
        self._open: dict[int, float] = {}
        """Peer with an open exchange -> time of the last progress."""
        self._attempts: dict[int, int] = {}
        """Suspected peer -> attempts to reach it since the suspicion began."""
        self._retry_at: dict[int, float] = {}

    def open(self, peer: int, now: float) -> None:
        """An exchange with the peer has begun. Without effect if one is open."""
        self._open.setdefault(peer, now)

    def progress(self, peer: int, now: float) -> None:
        """The peer has sent, received or applied something: it is not suspected, and its time starts again."""
        if peer in self._open:
            self._open[peer] = now
        self._attempts.pop(peer, None)
        self._retry_at.pop(peer, None)

    def close(self, peer: int) -> None:
        """No exchange with the peer is open any more. A suspicion stays until there is progress."""
        self._open.pop(peer, None)

    def disconnected(self, peer: int, now: float) -> None:
        """The connection to the peer broke, or an attempt to reach it failed: suspect it and lengthen the back-off."""
        attempts = self._attempts[peer] = self._attempts.get(peer, -1) + 1
        self._retry_at[peer] = now + min(self._retry_s * 2.0**attempts, self._max_retry_s)

    def suspected(self, now: float) -> set[int]:
        """Return the peers to pass over."""
        for peer, since in self._open.items():
            if peer not in self._attempts and now - since >= self._suspect_s:
                self.disconnected(peer, now)
        return set(self._attempts)

    def may_retry(self, peer: int, now: float) -> bool:
        """Return whether the peer may be contacted now: it is not suspected, or its back-off is over."""
        return peer not in self.suspected(now) or now >= self._retry_at[peer]

    def next_change(self, now: float) -> float | None:
        """Return when a peer becomes suspected or may be contacted again, if nothing else happens; None: never."""
        deadlines = [since + self._suspect_s for peer, since in self._open.items() if peer not in self._attempts]
        return min([time for time in [*deadlines, *self._retry_at.values()] if time > now], default=None)

    def remove(self, peer: int) -> None:
        """The peer has left or failed: drop everything about it."""
        for table in (self._open, self._attempts, self._retry_at):
            table.pop(peer, None)
