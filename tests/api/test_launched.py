"""Ranks without the local launcher: several sessions in one process, and a rank that cannot start."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

import pytest
from command import ROUNDELAY, TORCHRUN, Job, Jobs

from roundelay.fleet.store import serve_store
from roundelay.launch.rendezvous import STORE_VARIABLE

pytestmark = pytest.mark.dist
LIMIT_S = 90.0

TWO_SESSIONS = """
import sys, torch
import roundelay
from torch import nn

torch.set_num_threads(1)
hashes = []
for number in range(3):
    torch.manual_seed(number)
    module = nn.Linear(4, 3)
    data = [(torch.randn(4), torch.tensor(n % 3)) for n in range(24)]
    try:
        raise ValueError("an exception of the caller, which is being handled")
    except ValueError:
        with roundelay.Session(module, torch.optim.SGD(module.parameters(), lr=0.1), strategy=sys.argv[1]) as session:
            for batch in session.loader(data, batch_size=4):
                session.step(lambda: nn.functional.cross_entropy(module(batch.x), batch.y), samples=len(batch))
        failed = session.learner.job.store.list("failed/") if session.size > 1 else {}
    hashes.append(f"{float(module.weight.detach().double().sum()):.6f}")
    assert not failed, failed
print(f"rank {session.rank} of {session.size}: {' '.join(hashes)}", flush=True)
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def static_ranks(jobs: Jobs, size: int, *command: str, **env: str) -> list[Job]:
    """Start ranks without a launcher: with the variables of torchrun, set by hand."""
    common = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    return [jobs.start(*command, RANK=str(rank), LOCAL_RANK=str(rank), **common, **env) for rank in range(size)]


def script(jobs: Jobs) -> str:
    path = Path(jobs.folder / "sessions.py")
    path.write_text(TWO_SESSIONS)
    return str(path)


@pytest.mark.parametrize(
    ("size", "strategy", "store"), [(1, "adpsgd", ""), (2, "adpsgd", ""), (2, "sync", ""), (2, "adpsgd", "of a launcher")]
)
def test_sessions_in_sequence(jobs: Jobs, size: int, strategy: str, store: str) -> None:
    env, server = {}, None
    if store:
        server = serve_store("127.0.0.1")
        env = {STORE_VARIABLE: f"127.0.0.1:{server.port}"}
    ranks = static_ranks(jobs, size, sys.executable, script(jobs), strategy, **env)
    lines = [job.end(LIMIT_S).expect(0).out.strip() for job in ranks]
    assert [line.partition(":")[0] for line in lines] == [f"rank {rank} of {size}" for rank in range(size)]
    assert len({line.partition(":")[2] for line in lines}) == 1, "all ranks hold the same average models"
    if server is not None:
        server.close()


def test_sessions_in_sequence_under_torchrun(jobs: Jobs) -> None:
    job = jobs.start(TORCHRUN, "--standalone", "--nproc-per-node", "2", script(jobs), "adpsgd")
    lines = job.end(LIMIT_S).expect(0).out.strip().splitlines()
    assert len(lines) == 2


CANNOT_START = """
import os
from dataclasses import dataclass
from tasks import Dots

@dataclass(frozen=True)
class Damaged(Dots):
    where: str = ""

    def __post_init__(self):
        super().__post_init__()
        self.fail("constructor")

    def build(self):
        self.fail("build")
        return super().build()

    def fail(self, where):
        if where == self.where and os.environ["RANK"] == "1":
            raise ValueError("no such archive")
"""


@pytest.mark.parametrize(("where", "error", "code"), [("constructor", "UsageError", 2), ("build", "ValueError", 1)])
def test_the_other_ranks_learn_why_a_rank_cannot_start(jobs: Jobs, where: str, error: str, code: int) -> None:
    (jobs.folder / "damaged.py").write_text(CANNOT_START)
    command = [ROUNDELAY, "train", jobs.task(where=where), "task=damaged:Damaged", "run=run", "strategy=adpsgd"]
    ranks = static_ranks(jobs, 2, *command, "failure_s=600")  # it must not depend on the expiry of a heartbeat
    first, second = (job.end(LIMIT_S) for job in ranks)
    assert (first.code, second.code) == (4, code), first.err + second.err
    assert re.search(rf"rank 1 \(ended with {error}: .*no such archive.*\) was lost", first.expect(4).err)
