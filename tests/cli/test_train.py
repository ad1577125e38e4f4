"""`roundelay train` under a launcher: ranks whose settings differ stop before anything is written."""

from __future__ import annotations

import socket

import pytest
from command import ROUNDELAY, Jobs


@pytest.mark.dist
@pytest.mark.timeout(120)
def test_ranks_whose_settings_differ_end_with_one_message_and_write_nothing(jobs: Jobs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [ROUNDELAY, "train", jobs.task(), "run=run", "strategy=sync"]
    ranks = [jobs.start(*command, f"batch={8 << rank}", RANK=str(rank), LOCAL_RANK=str(rank), **env) for rank in (0, 1)]
    errors = [rank.end(100).expect(2).err for rank in ranks]
    for error in errors:
        assert "batch must be equal on all ranks (rank 0: 8, rank 1: 16)" in error
    assert not (jobs.folder / "run").exists()
