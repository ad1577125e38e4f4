"""torch's process groups on the job's store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore

from roundelay.comm.torch_backend import gloo
from roundelay.comm.torch_store import TorchStore
from roundelay.errors import PeerLost
from roundelay.fleet.store import JobStore, StoreClient, connect_store, serve_store


@pytest.fixture
def job_store() -> Iterator[JobStore]:
    server = serve_store("127.0.0.1")
    yield JobStore(connect_store("127.0.0.1", server.port, 10.0), "job/")
    server.close()


def test_torch_uses_the_store_through_a_prefix(job_store: JobStore) -> None:
    torch_store = TorchStore(job_store, 5.0)
    prefixed: Any = PrefixStore("group", torch_store)  # calls go through C++
    data = bytes(range(256))
    prefixed.set("bytes", data)
    assert prefixed.get("bytes") == data
    assert torch_store.get("group/bytes") == data
    assert [prefixed.add("count", 3), prefixed.add("count", 4)] == [3, 7]
    assert prefixed.get("count") == b"7"
    assert prefixed.check(["bytes", "count"])
    assert not prefixed.check(["bytes", "nothing"])
    assert prefixed.compare_set("new", "", "one") == b"one"
    assert prefixed.compare_set("new", "", "two") == b"one"
    assert prefixed.compare_set("new", "one", "three") == b"three"
    assert prefixed.delete_key("new")
    assert not prefixed.check(["new"])
    assert prefixed.num_keys() == 2
    threading.Timer(0.1, job_store.set, ("group/late", "x")).start()
    prefixed.wait(["bytes", "late"], timedelta(seconds=5))


def test_a_wait_ends_by_its_deadline_or_by_a_failure(job_store: JobStore) -> None:
    torch_store = TorchStore(job_store, 0.2)
    with pytest.raises(PeerLost, match="did not set 'never'"):
        torch_store.get("never")

    def fail() -> None:
        raise PeerLost("rank 1 was lost")

    failing = TorchStore(job_store, 60.0, fail)
    with pytest.raises(PeerLost, match="rank 1 was lost"):
        failing.wait(["never"])
    with pytest.raises(PeerLost, match="rank 1 was lost"):  # also through gloo's own code
        gloo(job_store, "broken", 0, 2, "127.0.0.1", 60.0, fail)


class CountingClient:
    """A client of the store that counts its calls."""

    def __init__(self, client: StoreClient) -> None:
        self.client, self.calls = client, 0

    def call(self, operation: str, *arguments: Any, wait_s: float = 0.0) -> Any:
        self.calls += 1
        return self.client.call(operation, *arguments, wait_s=wait_s)

    def wait(self, seconds: float, keys: list[str]) -> bool:
        self.calls += 1
        return self.client.wait(seconds, keys)


@pytest.mark.parametrize("size", [3, 12])
def test_gloo_meets_through_the_store_with_a_constant_number_of_calls_per_rank(job_store: JobStore, size: int) -> None:
    sums: dict[int, torch.Tensor] = {}
    clients = [CountingClient(job_store.client.clone()) for _ in range(size)]
    waits: list[int] = []

    def run(rank: int) -> None:
        store = JobStore(clients[rank], "job/")  # type: ignore[arg-type]
        group = gloo(store, "all", rank, size, "127.0.0.1", 20.0, lambda: waits.append(rank))
        sums[rank] = torch.full((4,), float(rank))
        group.allreduce([sums[rank]]).wait()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [sums[rank].tolist() for rank in range(size)] == [[sum(range(size))] * 4] * size
    for rank, client in enumerate(clients):
        assert client.calls - waits.count(rank) <= 3, "set, wait, get_many"
