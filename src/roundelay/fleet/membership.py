"""What every backend does in the same way: starting exchanges, leaving together, and knowing who is dead."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from roundelay.core.contracts import Store
from roundelay.errors import PeerLost


class StoreMembership:
    """Who of the whole job is dead, as the job's store knows it. Ranks here are ranks of the whole job."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._dead: dict[int, str] = {}
        self._known = 0

    def report(self, rank: int, why: str) -> None:
        """Somebody noticed that a rank is gone."""
        if rank not in self.failed_ranks() and self.store.add(f"reported/{rank}", 1) == 1:
            number = self.store.add("deaths", 1)
            self.store.set(f"death/{number}", json.dumps({"rank": rank, "why": why}))

    def failed_ranks(self) -> dict[int, str]:
        """Everybody known to be dead, with the reason."""
        deaths = int(self.store.get("deaths") or 0)
        while self._known < deaths:
            note = self.store.get(f"death/{self._known + 1}")
            if note is None:
                break  # announced, its note is a moment away
            said = json.loads(note)
            self._dead[said["rank"]] = said["why"]
            self._known += 1
        return self._dead

    def explain(self, error: BaseException, ranks: Sequence[int], rank: int, patience_s: float = 8.0) -> PeerLost:
        """Names the lost rank behind a failed rendezvous; the news may be a moment behind the failure."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            lost = {r: why for r, why in self.failed_ranks().items() if r in ranks}
            if lost:
                named = ", ".join(f"rank {r} ({why})" for r, why in sorted(lost.items()))
                return PeerLost(
                    f"{named} was lost",
                    where=f"rank {rank}, waiting for everybody",
                    hint="look at that rank's log; start again with resume=auto to go on from the last checkpoint",
                )
            time.sleep(0.1)
        return PeerLost(
            "a peer was lost, and nobody knows which",
            where=f"rank {rank}: {str(error).splitlines()[0]}",
            hint="look at the logs of the ranks that are silent; start again with resume=auto",
        )
