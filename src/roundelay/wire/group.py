"""What every wire does in the same way: starting meetings, leaving together, and knowing who is dead."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

from roundelay.core.net import Store
from roundelay.errors import PeerLost
from roundelay.wire.agent import Agent

POLL_S = 0.02


class Roll:
    """Who of the whole job is dead, as the job's store knows it. Ranks here are ranks of the whole job."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._dead: dict[int, str] = {}
        self._known = 0

    def report(self, rank: int, why: str) -> None:
        """Somebody noticed that a rank is gone."""
        if rank not in self.dead() and self.store.add(f"reported/{rank}", 1) == 1:
            number = self.store.add("deaths", 1)
            self.store.set(f"death/{number}", json.dumps({"rank": rank, "why": why}))

    def dead(self) -> dict[int, str]:
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
            lost = {r: why for r, why in self.dead().items() if r in ranks}
            if lost:
                named = ", ".join(f"rank {r} ({why})" for r, why in sorted(lost.items()))
                return PeerLost(
                    f"{named} was lost",
                    where=f"rank {rank}, waiting for everybody",
                    do="look at that rank's log; start again with resume=auto to go on from the last checkpoint",
                )
            time.sleep(0.1)
        return PeerLost(
            "a peer was lost, and nobody knows which",
            where=f"rank {rank}: {str(error).splitlines()[0]}",
            do="look at the logs of the ranks that are silent; start again with resume=auto",
        )


class Meetings:
    """The background meetings of one learner, and how all leave them together."""

    def __init__(
        self, agent: Agent, roll: Roll, ranks: Sequence[int], rank: int, name: str, timeout_s: float, local_store: Store
    ) -> None:
        self.agent, self.roll, self.ranks, self.rank, self.name = agent, roll, ranks, rank, name
        self.timeout_s, self.store = timeout_s, local_store
        self.rounds = 0
        """Rounds that everybody has played, known once all have left."""

    def credit(self) -> None:
        self.agent.credit()

    def drain(self) -> dict[str, float]:
        return self.agent.figures()

    def finish(self) -> None:
        """The agent goes on answering until every living learner is done; then all stop asking, post the round they have
        entered, and play on to the highest of them, so that nobody is left in a half-finished round."""
        self.store.set(f"{self.name}/done/{self.rank}", "1")
        self._wait_for("done")
        self.store.set(f"{self.name}/entered/{self.rank}", str(self.agent.stop_asking()))
        entered = self._wait_for("entered")
        self.rounds = max(entered) + 1
        self.agent.play_to(max(entered))
        # Nobody may hang up while another still plays its last round.
        self.store.set(f"{self.name}/rested/{self.rank}", "1")
        self._wait_for("rested")

    def _wait_for(self, what: str) -> list[int]:
        said: dict[int, int] = {}
        while True:
            self.agent._check()
            dead = self.roll.dead()
            for member in range(len(self.ranks)):
                if member not in said and self.ranks[member] not in dead:
                    value = self.store.get(f"{self.name}/{what}/{member}")
                    if value is not None:
                        said[member] = int(value)
            if all(member in said or self.ranks[member] in dead for member in range(len(self.ranks))):
                return list(said.values())
            time.sleep(POLL_S)


class Turned:
    """A pending result that still wants a last touch when it is waited for."""

    def __init__(self, wait: Callable, done: Callable[[], bool]) -> None:
        self._wait, self._done = wait, done

    @property
    def done(self) -> bool:
        return self._done()

    def wait(self):
        return self._wait()
