"""Machines of network namespaces, and a small real comparison between two of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from benchmarks.namespaces import MEMORY, NetnsMachines, run, sweep
from benchmarks.time_to_loss import Contest, TimeToLoss, TimeToLossResult

from benchmarks import hierarchy, network

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")
needs_tools = pytest.mark.skipif(not (shutil.which("ip") and shutil.which("tc")), reason="ip and tc are not installed")

FRAMES = "roundelay.testing.tasks:SyntheticFrames"
TALK = textwrap.dedent("""
    import socket, sys, threading, time
    role, address, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if role == "server":
        listener = socket.create_server((address, 5000))
        print("ready", flush=True)
        bulk, small = listener.accept()[0], listener.accept()[0]
    else:
        bulk, small = socket.create_connection((address, 5000)), socket.create_connection((address, 5000))
    small.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    waits = []
    def chat():
        for _ in range(20):
            if role == "server":
                small.sendall(small.recv(1))
            else:
                began = time.perf_counter()
                small.sendall(b"x"), small.recv(1)
                waits.append(time.perf_counter() - began)
                time.sleep(0.02)
    chatting = threading.Thread(target=chat)
    began = time.perf_counter()
    sending = threading.Thread(target=bulk.sendall, args=(bytes(size),))
    sending.start(), chatting.start()
    left = size
    while left:
        left -= len(bulk.recv(min(left, 1 << 16)))
    seconds = time.perf_counter() - began
    sending.join(), chatting.join()
    print(seconds, sorted(waits)[len(waits) // 2] if waits else 0.0, flush=True)
""")


def ours() -> list[str]:
    """What this process has made and not removed."""
    mark = f"roundelay-{os.getpid()}-"
    names = [line.split()[0] for line in run("ip", "netns", "list").splitlines() if line.strip()]
    return [n for n in names if n.startswith(mark)] + [p.name for p in MEMORY.glob(f"{mark}*")]


@needs_root
@needs_tools
@pytest.mark.parametrize("count", [2, 3])
def test_cables_hold_their_rate_in_both_directions(count: int) -> None:
    size, mbit = 2_000_000, 20
    with NetnsMachines(count, mbit) as machines:
        before = machines.sent_bytes()
        server = machines.start(0, [sys.executable, "-c", TALK, "server", machines.address(0), str(size)], dict(os.environ))
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        client = machines.start(
            count - 1, [sys.executable, "-c", TALK, "client", machines.address(0), str(size)], dict(os.environ)
        )
        (seconds, _), (seconds_back, wait) = (
            map(float, process.communicate(timeout=20)[0].split()) for process in (server, client)
        )
        sent = [after - b for after, b in zip(machines.sent_bytes(), before, strict=True)]
    fair = 8 * size / (mbit * 1e6)
    # the bucket lets 128 kB through at once; headers take a few per cent
    assert fair * 0.85 < min(seconds, seconds_back)
    assert max(seconds, seconds_back) < fair * 2.5
    assert wait < 0.25, "a small message waits too long behind a large one"
    assert size < sent[0] < 1.3 * size
    assert size < sent[count - 1] < 1.3 * size
    assert ours() == []


@needs_root
@needs_tools
def test_only_the_namespaces_of_a_killed_process_are_removed() -> None:
    code = textwrap.dedent("""
        import os, signal, sys
        from benchmarks.namespaces import NetnsMachines
        with NetnsMachines(2, 100) as machines:
            machines.start(0, ["sleep", "600"], dict(os.environ))
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    with NetnsMachines(2, 100) as machines:
        mine = ours()
        dead = subprocess.Popen([sys.executable, "-c", code])
        assert dead.wait(timeout=60) == -signal.SIGKILL
        left = f"roundelay-{dead.pid}-0"
        sleeper = run("ip", "netns", "pids", left).split()
        assert len(sleeper) == 1
        gone = sweep()
        assert left in gone
        assert f"roundelay-{dead.pid}-shared" in gone
        assert not any(name in run("ip", "netns", "list") for name in gone)
        assert not Path(f"/proc/{sleeper[0]}/root").exists() or _ended(int(sleeper[0]))
        assert ours() == mine
        machines.set_rate(50)  # still there
    assert ours() == []


def _ended(pid: int) -> bool:
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


@needs_root
@needs_tools
@pytest.mark.dist
@pytest.mark.timeout(120)
def test_ddp_and_gossip_between_two_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(network.LINKS, "200mbit", 10)  # slow enough for this small model to be photographed often
    contest = Contest(batch=8, samples=768, rates=(0.6, 1e9))  # the second rate is nonsense, and must lose
    entries = [network.ENTRIES[name] for name in ("ddp", "adpsgd")]
    report = network.compare(entries, ["200mbit"], contest, FRAMES, quick=True)
    assert ours() == []
    ddp, adpsgd = report["results"]
    assert (ddp["contestant"], adpsgd["contestant"]) == ("ddp", "adpsgd")
    assert ddp["rate"] == adpsgd["rate"] == 0.6
    assert ddp["ratio_to_ddp"] == 1.0
    assert ddp["seconds_to_loss"] > 0
    # at this rate ddp is single with the same global batch: it is at the target after half the budget
    assert 0.75 * 384 < ddp["samples_to_loss"] < 1.25 * 384
    # every step sends the gradient (a sum of halves over two learners), plus headers and the job's small talk
    assert 4 * report["parameters"] < ddp["sent_bytes_per_step"] < 8 * report["parameters"]
    if "seconds_to_loss" in adpsgd:
        assert adpsgd["ratio_to_ddp"] == pytest.approx(adpsgd["seconds_to_loss"] / ddp["seconds_to_loss"], rel=0.01)
    assert report["in_words"][0].startswith("200mbit: ")


@needs_root
@needs_tools
@pytest.mark.dist
@pytest.mark.timeout(120)
def test_a_machine_of_two_learners_sends_one_model_per_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hierarchy, "TASK", FRAMES)
    monkeypatch.setattr(hierarchy, "STEPS", 24)
    monkeypatch.setattr(hierarchy, "RATES", (0.6,))
    report = hierarchy.compare(["2x2"], lambda text: None, quick=True)
    assert ours() == []
    ours_, flat = report["results"]
    for sent in ours_["models_per_machine_and_exchange"]:
        assert 0.9 < sent < 1.6
    for sent in flat["models_per_machine_and_exchange"]:
        assert 0.9 < sent < 5  # exchanges inside a machine take the place of rounds for which the link is busy
    assert "2x2" in hierarchy.table(report)


@needs_root
@needs_tools
@pytest.mark.timeout(90)
def test_ctrl_c_removes_everything() -> None:
    command = [sys.executable, "-m", "benchmarks.network", "--quick", "--task", FRAMES]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    mark = f"roundelay-{process.pid}-"
    deadline = time.monotonic() + 60
    while f"{mark}1" not in run("ip", "netns", "list"):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 130, text
    assert "Traceback" not in text
    assert mark not in run("ip", "netns", "list")
    assert not list(MEMORY.glob(f"{mark}*"))


@pytest.mark.parametrize("missing", ["root", "tools"])
def test_missing_requirements_are_named(missing: str) -> None:
    if missing == "root" and not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("ip and tc are not installed: that error comes first")
    code = "import os, sys; from benchmarks import network; from benchmarks.common import run_main\n"
    if missing == "root" and os.geteuid() == 0:
        code += "os.seteuid(65534)\n"
    env = {**os.environ, "PATH": "/nonexistent"} if missing == "tools" else None
    command = [sys.executable, "-c", code + "sys.argv = ['network']; run_main(network.main)"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert ("only root" if missing == "root" else "'ip' is not installed") in done.stderr
    assert "what to do" in done.stderr
    assert "Traceback" not in done.stderr


class Curve:
    """Workers whose loss is a function of the snapshot."""

    def __init__(self, losses: list[float]) -> None:
        self.losses = losses
        self.asked: list[int] = []

    def loss(self, snapshots: list[tuple[int, int]]) -> float:
        slots = {slot for _, slot in snapshots}
        assert len(slots) == 1, "snapshots of different times were put together"
        self.asked.append(slots.pop())
        return self.losses[self.asked[-1]]


def evaluated(losses: list[float], target: float) -> tuple[TimeToLossResult, Curve]:
    """Two learners, a snapshot every second from second 1 on, the second learner 0.1 s late; 10 samples a second each."""
    members = [
        {
            "began": 100.0,
            "snapshots": [{"seconds": 101.0 + i + 0.1 * rank, "samples": 10 * (i + 1), "slot": i} for i in range(len(losses))],
        }
        for rank in range(2)
    ]
    outcome, curve = TimeToLossResult(0.1, samples=20 * len(losses), members=members), Curve(losses)
    TimeToLoss(curve, outcome, target).evaluate()  # type: ignore[arg-type]
    return outcome, curve


def test_the_time_of_a_loss_is_interpolated_between_snapshots() -> None:
    outcome, curve = evaluated([5.0, 4.0, 3.0, 2.0, 1.0, 0.9, 0.8, 0.7, 0.6], target=1.5)
    assert outcome.seconds_to_loss == pytest.approx(4.5)
    assert outcome.samples_to_loss == pytest.approx(90.0)
    assert outcome.last_loss == 0.6
    assert len(set(curve.asked)) == len(curve.asked) <= 5, "snapshots are evaluated at most once"


def test_the_first_time_at_the_loss_counts() -> None:
    came, _ = evaluated([5.0, 3.0, 2.0, 1.0, 1.0, 1.0, 4.0, 4.0, 4.0], target=1.5)
    assert came.seconds_to_loss == pytest.approx(3.5)
    never, _ = evaluated([5.0, 4.0, float("nan"), 2.0], target=1.5)
    assert not never.reached
    at_once, _ = evaluated([1.0, 0.9], target=1.5)
    assert at_once.seconds_to_loss == pytest.approx(1.0)


def test_a_competitor_that_missed_the_target_has_no_seconds() -> None:
    outcomes = {
        "ddp": [TimeToLossResult(0.1, samples=100, seconds=10.0, cpu_s=5.0, sent_bytes=[8, 8], members=[{}, {}],
                        seconds_to_loss=8.0, samples_to_loss=80.0)],
        "kstep": [TimeToLossResult(0.1, samples=100, seconds=4.0, cpu_s=5.0, sent_bytes=[8, 8], members=[{}, {}])],
    }  # fmt: skip
    ddp, kstep = network.rows(outcomes, "1gbit", 8)
    assert ddp["seconds_to_loss"] == 8.0
    assert ddp["cpu_ratio"] == 1.0
    assert not {"seconds_to_loss", "ratio_to_ddp", "range", "cpu_ratio"} & set(kstep)
    json.dumps([ddp, kstep])
    assert network.winner(outcomes, "1gbit") == "1gbit: ddp wins with 8.0 s. Not at the target within the budget: kstep."
