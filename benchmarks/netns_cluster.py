"""The processes of a network benchmark, seen from the process that controls them."""

from __future__ import annotations

import itertools
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from benchmarks.namespaces import CARD, NetnsMachines
from roundelay.errors import PeerLost

PORT = 29500
START_S = 120.0


class NetnsCluster:
    """One process per learner on its machine; `learners[m]` of them on machine m. A context manager."""

    def __init__(self, machines: NetnsMachines, learners: Sequence[int], task: str, settings: dict[str, Any]) -> None:
        self.machines = machines
        self.homes = [m for m, count in enumerate(learners) for _ in range(count)]
        """The machine of every rank."""
        self.size = len(self.homes)
        self.parameters = self.samples = 0
        self._task, self._settings = task, settings
        self._numbers = itertools.count()
        self._members: list[subprocess.Popen[str]] = []

    def __enter__(self) -> NetnsCluster:
        try:
            command = [sys.executable, "-m", "benchmarks.netns_worker"]
            self._members = [
                self.machines.start(self.homes[rank], command, self._environment(rank)) for rank in range(self.size)
            ]
            about = self._answers(range(self.size), START_S)
            self.parameters, self.samples = about[0]["parameters"], about[0]["samples"]
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        for member in self._members:
            member.kill()
        for member in self._members:
            member.wait()
        self._members = []
        for buffer in self.machines.folder.glob("*"):
            buffer.unlink()

    def _environment(self, rank: int) -> dict[str, str]:
        """Return torchrun's variables and those of a worker."""
        home = self.homes[rank]
        return {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.homes[:rank].count(home)),
            "LOCAL_WORLD_SIZE": str(self.homes.count(home)),
            "GROUP_RANK": str(home),
            "MASTER_ADDR": self.machines.address(self.homes[0]),
            "MASTER_PORT": str(PORT),
            "HOST_ADDRESS": self.machines.address(home),
            "GLOO_SOCKET_IFNAME": CARD,
            "OMP_NUM_THREADS": "1",
            "SNAPSHOTS": str(self.machines.folder),
            "TASK": self._task,
            "TASK_SETTINGS": json.dumps(self._settings),
        }

    def all(self, what: str, timeout_s: float, **job: Any) -> list[dict[str, Any]]:
        """All members do a job together; their metrics, by rank."""
        number = next(self._numbers)
        return self.ask({rank: {"job": what, "number": number, **job} for rank in range(self.size)}, timeout_s)

    def loss(self, snapshots: Sequence[tuple[int, int]]) -> float:
        """Held-out loss at the mean of snapshots, given as (rank, slot)."""
        jobs = {
            rank: {"job": "evaluate", "snapshots": list(snapshots), "part": rank, "parts": self.size}
            for rank in range(self.size)
        }
        answers = self.ask(jobs, 120.0)
        return sum(a[0] for a in answers) / sum(a[1] for a in answers)

    def ask(self, jobs: dict[int, dict[str, Any]], timeout_s: float) -> list[Any]:
        """Gives each of these ranks its job; returns their answers in the order of `jobs`."""
        for rank, job in jobs.items():
            pipe = self._members[rank].stdin
            assert pipe is not None
            try:
                pipe.write(json.dumps(job) + "\n")
                pipe.flush()
            except OSError:
                continue  # its end is noticed below, with its exit code
        return [answer["result"] for answer in self._answers(list(jobs), timeout_s)]

    def _answers(self, ranks: Sequence[int], timeout_s: float) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                pipe = self._members[rank].stdout
                assert pipe is not None
                selector.register(pipe, selectors.EVENT_READ, rank)
            while len(answers) < len(ranks):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    late = sorted(set(ranks) - set(answers))
                    raise PeerLost(f"no answer from learners {late} in {timeout_s:.0f} s", where="network")
                for key, _ in ready:
                    line = key.fileobj.readline()  # type: ignore[union-attr]
                    selector.unregister(key.fileobj)
                    answer = json.loads(line) if line else {"error": f"it ended with {self._members[key.data].wait()}"}
                    if "error" in answer:
                        raise PeerLost(f"learner {key.data} failed: {answer['error']}", where="network")
                    answers[key.data] = answer
        return [answers[rank] for rank in ranks]
