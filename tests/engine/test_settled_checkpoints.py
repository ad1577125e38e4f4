"""Checkpoints that wait for a failed rank, and the store calls of checkpoints and evaluations."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roundelay.core.files import digest
from roundelay.engine import checkpoint
from roundelay.engine.background import BackgroundCalls
from roundelay.engine.checkpoint import ABANDONED, Checkpoints
from roundelay.engine.evaluator import Evaluator
from roundelay.engine.finishing import MODEL_CHOSEN, Finisher, write_model
from roundelay.engine.sharding import DynamicSharding, ShardPlan
from roundelay.engine.store_watch import StoreWatch
from roundelay.errors import DataError
from roundelay.fleet.membership import StoreMembership
from roundelay.fleet.store import JobStore, LocalStore


class CountingStore(LocalStore):
    """Counts calls by thread."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if name in ("set", "get", "get_many", "list", "add", "claim", "compare_and_set"):
            self.calls[threading.current_thread().name] += 1
        return super().__getattribute__(name)

    def new_calls(self) -> int:
        """Return the calls of this thread since the last time."""
        return self.calls.pop(threading.current_thread().name, 0)


class SlowClient:
    """The client of a store that is `rtt_s` away."""

    def __init__(self, store: LocalStore, rtt_s: float) -> None:
        self.store, self.rtt_s = store, rtt_s

    def call(self, operation: str, *arguments: Any, wait_s: float = 0.0) -> Any:
        time.sleep(self.rtt_s)
        return getattr(self.store, operation)(*arguments)

    def watch(self, seconds: float, keys: list[str]) -> bool:
        time.sleep(self.rtt_s)
        self.store.pause(seconds, *keys)
        return True


def learner(store: Any, rank: int, size: int, failed: dict[int, str] | None = None) -> Any:
    membership = StoreMembership(store)
    return SimpleNamespace(
        rank=rank,
        job=SimpleNamespace(store=store, membership=membership),
        context=SimpleNamespace(rank=rank, size=size),
        watchdog=SimpleNamespace(failed=failed if failed is not None else {}),
        events=SimpleNamespace(write=lambda *_, **__: None),
        node_leaders=list(range(size)),
        strategy=SimpleNamespace(traits=SimpleNamespace(sharding="dynamic")),
        sharding=None,
    )


def note_shard(folder: Path, of: Any) -> None:
    (folder / f"rank-{of.rank:03d}.json").write_text(json.dumps({"completed": [], "completed_by_failed": []}))
    (folder / f"rank-{of.rank:03d}.safetensors").write_text("")


def note_manifest(self: Checkpoints, partial: Path, position: int, ranks: list[int]) -> dict[str, Any]:
    (partial / "meta.json").write_text(json.dumps(ranks))
    return {"spread": 0.5}


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the content of checkpoints by short texts."""
    monkeypatch.setattr(checkpoint, "write_shard", note_shard)
    monkeypatch.setattr(Checkpoints, "write_manifest", note_manifest)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.usefixtures("small_files")
def test_only_the_newest_of_several_waiting_checkpoints_is_completed(tmp_path: Path) -> None:
    store, failed = LocalStore(), {}
    ranks = {r: Checkpoints(tmp_path, learner(store, r, 3, failed), 9, {}) for r in (0, 2)}
    for position in (100, 200, 300):
        for each in ranks.values():
            each.save(position)
    ranks[2].save(400)  # rank 0 has not come so far
    StoreMembership(store).report(1, "frozen")
    failed[1] = "frozen"
    ranks[2].poll()
    ranks[0].poll()
    for each in ranks.values():
        each.poll()
        assert each.complete == [(300, 0.5)]
    assert ranks[0].waiting == set()
    assert ranks[2].waiting == {400}
    assert store.get("complete/100") == store.get("complete/200") == ABANDONED
    assert names(tmp_path) == {"samples-000000000300", ".samples-000000000400.partial"}
    ranks[0].save(400)
    assert names(tmp_path) == {"samples-000000000300", "samples-000000000400"}


@pytest.mark.usefixtures("small_files")
def test_a_checkpoint_that_another_rank_is_completing_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, failed = LocalStore(), {1: "frozen"}
    zero, two = (Checkpoints(tmp_path, learner(store, r, 3, failed), 9, {}) for r in (0, 2))
    StoreMembership(store).report(1, "frozen")
    zero.save(100)
    link, later = checkpoint.link, [200]

    def complete_a_later_one_first(source: Path, folder: Path) -> None:
        if later:  # rank 2 is in the middle of 100
            position = later.pop()
            two.save(position)
            zero.save(position)
        link(source, folder)

    monkeypatch.setattr(checkpoint, "link", complete_a_later_one_first)
    two.save(100)
    zero.poll()
    assert zero.complete == [(100, 0.5), (200, 0.5)]
    assert names(tmp_path) == {"samples-000000000100", "samples-000000000200"}


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("later", [True, False])
def test_missing_shards_are_an_error_only_if_no_later_checkpoint_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: bool
) -> None:
    store = LocalStore()
    only = Checkpoints(tmp_path, learner(store, 0, 1), 9, {})
    if later:
        store.set("complete/200", json.dumps({"spread": 0.0}))

    def missing(source: Path, folder: Path) -> None:
        raise FileNotFoundError(2, "No such file or directory", str(source))

    monkeypatch.setattr(checkpoint, "link", missing)
    if not later:
        with pytest.raises(DataError):
            only.save(100)
        return
    only.save(100)
    only.poll()
    assert store.get("complete/100") == ABANDONED
    assert not only.waiting
    assert not only.complete


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("size", [4, 64])
def test_the_store_calls_of_a_checkpoint_do_not_depend_on_the_ranks(tmp_path: Path, size: int) -> None:
    store = CountingStore()
    ranks = [Checkpoints(tmp_path, learner(store, r, size), 9, {}) for r in range(size)]
    for each in ranks[:-1]:
        each.save(100)
        assert store.new_calls() <= 4
    ranks[-1].save(100)
    assert store.new_calls() <= 16


def test_waiting_for_results_costs_the_training_thread_no_store_call() -> None:
    local = LocalStore()
    store = JobStore(SlowClient(local, 0.1))  # type: ignore[arg-type]
    watch = StoreWatch(store)
    one = learner(store, 0, 2)
    evaluator = Evaluator(SimpleNamespace(samples=10), one, watch=watch)  # type: ignore[arg-type]
    lines: list[str] = []
    evaluator.log = lines.append
    evaluator._pending["evaluated/10", 10] = None
    began = time.perf_counter()
    for _ in range(100):
        evaluator.announce()
        assert watch.read(["complete/10"]) == {}
    assert time.perf_counter() - began < 0.1  # one call takes as long
    local.set("complete/10", "1")
    local.set("evaluated/10/result", json.dumps({"metrics": {"loss": 1.0}}))
    deadline = time.monotonic() + 10
    values: dict[str, str] = {}
    while not (values and lines) and time.monotonic() < deadline:
        values |= watch.read(["complete/10"]) if not values else {}
        evaluator.announce()
        time.sleep(0.01)
    assert values == {"complete/10": "1"}
    assert "loss 1.0000" in lines[0]
    watch.close()
    assert "store-watch" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.usefixtures("small_files")
def test_a_distant_store_delays_no_gradient_by_a_checkpoint(tmp_path: Path) -> None:
    local = LocalStore()
    store = JobStore(SlowClient(local, 0.1))  # type: ignore[arg-type]
    watch, background = StoreWatch(store), BackgroundCalls(store)
    checkpoints = Checkpoints(tmp_path, learner(store, 0, 1), 9, {}, watch, background)
    began = time.perf_counter()
    checkpoints.save(100)
    checkpoints.save(200)
    checkpoints.poll()
    assert time.perf_counter() - began < 0.1  # one call takes as long
    deadline = time.monotonic() + 20
    while checkpoints.waiting and time.monotonic() < deadline:
        checkpoints.poll()
        time.sleep(0.01)
    assert checkpoints.complete == [(100, 0.5), (200, 0.5)]
    assert names(tmp_path) == {"samples-000000000100", "samples-000000000200"}
    watch.close()
    background.close()


@pytest.mark.usefixtures("small_files")
def test_an_error_in_the_background_reaches_the_training_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Checkpoints, partial: Path, position: int, ranks: list[int]) -> dict[str, Any]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Checkpoints, "write_manifest", full)
    store = JobStore(SlowClient(LocalStore(), 0.001))  # type: ignore[arg-type]
    checkpoints = Checkpoints(tmp_path, learner(store, 0, 1), 9, {})
    checkpoints.save(100)
    with pytest.raises(DataError, match="No space left"):
        checkpoints.background.wait()
    checkpoints.save(200)

    def poll() -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            checkpoints.poll()

    with pytest.raises(DataError, match="No space left"):
        poll()
    checkpoints.background.close()
    checkpoints.watch.close()


@pytest.mark.usefixtures("small_files")
def test_a_shard_that_was_written_after_the_position_was_settled_is_deleted(tmp_path: Path) -> None:
    store = LocalStore()
    store.set("complete/100", ABANDONED)
    checkpoints = Checkpoints(tmp_path, learner(store, 0, 2), 9, {})
    checkpoints.save(100)
    checkpoints.poll()
    assert not checkpoints.waiting
    assert names(tmp_path) == set()
    assert store.get("saved/100") is None


@pytest.mark.parametrize("size", [3, 50])
def test_an_evaluation_is_added_up_with_a_constant_number_of_store_calls(size: int) -> None:
    store = CountingStore()
    evaluator = Evaluator(SimpleNamespace(samples=10), learner(store, 0, size))  # type: ignore[arg-type]
    for r in range(size):
        store.set(f"evaluated/10/{r}", json.dumps({"parts": {"loss": [2.0, 1.0]}, "effective": None, "seconds": 0.0}))
    evaluator._pending["evaluated/10", 10] = None
    store.new_calls()
    evaluator._try_to_add_up("evaluated/10", 10, None)
    assert store.new_calls() <= 5
    assert json.loads(store.get("evaluated/10/result") or "{}")["metrics"] == {"loss": 2.0}


@pytest.mark.parametrize("size", [3, 50])
def test_the_summaries_are_read_with_a_constant_number_of_store_calls(size: int) -> None:
    store = CountingStore()
    one = learner(store, 0, size)
    one.options = SimpleNamespace(timeout_s=5.0)
    one.context.runtime = SimpleNamespace(clock=time.monotonic)
    finisher = Finisher(one, None, None, False, None)  # type: ignore[arg-type]
    one.job.membership.report(1, "frozen")  # it has no summary
    for rank in set(range(size - 1)) - {1}:
        store.set(f"summary/{rank}", json.dumps({"rank": rank}))
    late = threading.Timer(0.1, lambda: store.set(f"summary/{size - 1}", json.dumps({"rank": size - 1})))
    late.start()
    store.new_calls()
    assert finisher._summaries(5.0) == {rank: {"rank": rank} for rank in range(size) if rank != 1}
    assert store.new_calls() <= 8
    late.join()


def test_the_manifest_counts_what_failed_ranks_without_a_shard_had_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "average_of_shards", lambda *_: (torch.zeros(1), 0.0))
    monkeypatch.setattr(checkpoint, "shard_tensor", lambda *_: torch.zeros(1))
    monkeypatch.setattr(checkpoint, "model_tensors", lambda *_: {"w": torch.zeros(1)})
    store = LocalStore()
    store.set("done/1/0", json.dumps([[8, 16], [24, 32]]))
    store.set("done/2/0", json.dumps([[40, 48]]))  # has a shard, which was written before it completed this
    one = learner(store, 0, 3)
    plan = ShardPlan(100, 100, [8, 8, 8], 0, [0], [0, 1, 2], 0)
    one.sharding = DynamicSharding(plan, store, (), True, dict, lambda: 0.0)
    work = tmp_path / "work"
    work.mkdir()
    for rank, spans in ((0, [[0, 8]]), (2, [[16, 24]])):
        (work / f"rank-{rank:03d}.json").write_text(json.dumps({"completed": spans, "completed_by_failed": []}))
    for rank in (1, 2):
        one.job.membership.report(rank, "frozen")
    one.job.membership.failed_ranks()
    meta = Checkpoints(tmp_path, one, 9, {}).write_manifest(work, 32, [0, 2])
    assert [list(span) for span in meta["completed"]] == [[0, 32]]


def test_a_late_second_writer_of_the_model_publishes_the_installed_file(tmp_path: Path) -> None:
    store, path = LocalStore(), tmp_path / "model.safetensors"
    path.write_bytes(b"model of an earlier run")
    notes: list[dict[str, Any]] = []

    def choose(own: str) -> str:
        """Rank 0 is slow: rank 1 writes the whole model before rank 0 gets to the claim."""
        notes.append(write_model(path, {"steps": torch.tensor(8)}, 1, lambda text: store.claim(MODEL_CHOSEN, text)))
        return store.claim(MODEL_CHOSEN, own)

    notes.append(write_model(path, {"steps": torch.tensor(7)}, 0, choose))
    assert notes[0] == notes[1]
    assert notes[0]["sha256"] == digest(path)
    assert names(tmp_path) == {"model.safetensors"}


def test_the_model_of_a_writer_that_died_after_the_choice_is_installed_by_another_rank(tmp_path: Path) -> None:
    store, path = LocalStore(), tmp_path / "model.safetensors"

    class Died(BaseException):
        pass

    def claim_and_die(own: str) -> str:
        store.claim(MODEL_CHOSEN, own)
        raise Died

    with pytest.raises(Died):
        write_model(path, {"steps": torch.tensor(7)}, 0, claim_and_die)
    note = write_model(path, {"steps": torch.tensor(8)}, 1, lambda text: store.claim(MODEL_CHOSEN, text))
    assert note["rank"] == 0
    assert note["sha256"] == digest(path)
    assert names(tmp_path) == {"model.safetensors"}
