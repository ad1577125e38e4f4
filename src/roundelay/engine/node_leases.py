"""The leases of one machine in a hierarchy: its leader owns them, and publishes them for the other ranks of the machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence

from roundelay.core.contracts import Store
from roundelay.errors import PeerLost
from roundelay.fleet.leases import Span

FOLLOW_AHEAD = 8
"""Leases of its node leader that a rank reads at once."""
FOLLOW_S = 0.25
"""Longest time between two looks at the leases of the node leader; a new lease ends it at once."""
KEPT_LEASES = 1000
"""Newest leases of a node leader that stay in the store. The ranks of a machine train together, so none is that far behind."""


class NodeLeases:
    """The sequence of leases of one machine, in the store under machine/LEADER/1, 2, 3, …; `null` ends it.

    published   leases that the leader has published
    """

    def __init__(self, store: Store, leader: int) -> None:
        self.store, self.leader = store, leader
        self.published = 0

    def values_of(self, spans: Sequence[Span]) -> dict[str, str | None]:
        """Return the keys that publish the next leases, to be written with them; those of old leases are None."""
        values: dict[str, str | None] = {}
        for number, span in enumerate(spans, self.published + 1):
            values[self._key(number)] = json.dumps(span)
            if number > KEPT_LEASES:
                values[self._key(number - KEPT_LEASES)] = None
                values[self._deleted] = str(number - KEPT_LEASES)
        return values

    def end(self) -> None:
        """Publish that no lease follows. One store call, on the leader."""
        self.store.set(self._key(self.published + 1), "null")

    def follow(self, rank: int, failed: Callable[[], Collection[int]]) -> Iterator[Span]:
        """Yield the leases that the leader publishes; wait for them. For the other ranks of the machine.

        Raises PeerLost if the leader fails, or if this rank is so far behind that a lease was deleted.
        """
        number = 1
        while True:
            first = number
            keys = [self._key(number + n) for n in range(FOLLOW_AHEAD)]
            texts = self.store.get_many([self._deleted, *keys])
            if int(texts[self._deleted] or 0) >= number:
                raise PeerLost(
                    f"this rank is more than {KEPT_LEASES} batches behind rank {self.leader}, which leases samples for it",
                    where=f"rank {rank}",
                    hint="look at the log of this rank; continue with resume=auto",
                )
            for key in keys:
                text = texts[key]
                if text is None:
                    break
                span = json.loads(text)
                if span is None:
                    return
                number += 1
                yield (span[0], span[1])
            if number > first:  # what was read is as old as the last step
                continue
            if self.leader in failed():
                raise PeerLost(
                    f"rank {self.leader}, which leases samples for this machine, has failed",
                    where=f"rank {rank}",
                    hint="look at the log of that rank; continue with resume=auto",
                )
            self.store.pause(FOLLOW_S, keys[0], "failures")

    def _key(self, number: int) -> str:
        return f"machine/{self.leader}/{number}"

    @property
    def _deleted(self) -> str:
        """Key with the number of the newest lease that was deleted."""
        return f"machine/{self.leader}/deleted"
