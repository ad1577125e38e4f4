"""Machines made of network namespaces, joined by links with a given bandwidth.

Each host is a namespace with one interface. Two hosts share a cable; more hosts are connected to a switch, a namespace with
a bridge. A token bucket limits both ends of a cable. The queue before it holds a few milliseconds, so a small message does
not wait long behind a model.

Everything is named after the process that created it. The next process removes what a killed process left.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from roundelay.errors import UsageError

PREFIX = "roundelay"
BURST = "128kb"
"""What may leave at once: two of the largest packets the kernel hands to an interface."""
QUEUE = "20ms"
"""The longest a packet waits before the cable; above that it is dropped and TCP slows down."""
MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
CARD = "lan0"
"""The name of a host's interface."""


def check_namespaces() -> None:
    """Says what is missing to make machines here."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise UsageError(f"the command '{tool}' is not installed", where="network", hint="install iproute2")
    if os.geteuid() != 0:
        raise UsageError(
            "only root may make network namespaces", where="network", hint="run it with sudo, or as root in a container"
        )


def run(*command: str) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UsageError(
            f"'{' '.join(command)}' failed: {done.stderr.strip() or done.stdout.strip()}",
            where="network",
            hint="the kernel must allow network namespaces, veth, bridges and the tbf queue (in a container: --privileged)",
        )
    return done.stdout


def sweep() -> list[str]:
    """Removes what killed processes left behind; returns the names of what went."""
    namespaces = [line.split()[0] for line in run("ip", "netns", "list").splitlines() if line.strip()]
    folders = [path.name for path in MEMORY.glob(f"{PREFIX}-*")]
    gone = [name for name in namespaces + folders if _abandoned(name)]
    for name in gone:
        _remove(name)
        shutil.rmtree(MEMORY / name, ignore_errors=True)
    return gone


def _abandoned(name: str) -> bool:
    parts = name.split("-")
    return len(parts) == 3 and parts[0] == PREFIX and parts[1].isdigit() and not _maker_lives(int(parts[1]))


def _sign(pid: int) -> str:
    return f"\0{PREFIX}-namespaces-{pid}"


def _maker_lives(pid: int) -> bool:
    """Return whether a process lives: it holds an abstract socket, which the kernel frees when the process ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(_sign(pid))
        except OSError:
            return True
    return False


def _remove(name: str) -> None:
    counts = subprocess.run(("ip", "netns", "pids", name), capture_output=True, text=True, check=False)
    for pid in counts.stdout.split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue
    subprocess.run(("ip", "netns", "del", name), capture_output=True, check=False)


def _cable(host: str, card: str, other: str, port: str) -> None:
    run("ip", "link", "add", "name", card, "netns", host, "type", "veth", "peer", "name", port, "netns", other)


class NetnsMachines:
    """`count` hosts on cables of `mbit` Mbit/s. A context manager."""

    def __init__(self, count: int, mbit: int) -> None:
        self.count, self.mbit = count, mbit
        self._sign: socket.socket | None = None

    def host(self, number: int) -> str:
        return f"{PREFIX}-{os.getpid()}-{number}"

    @property
    def switch(self) -> str:
        return f"{PREFIX}-{os.getpid()}-switch"

    @property
    def folder(self) -> Path:
        """A folder in memory that all hosts see, whatever their network is like."""
        return MEMORY / f"{PREFIX}-{os.getpid()}-shared"

    def address(self, number: int) -> str:
        return f"10.77.0.{number + 1}"

    def __enter__(self) -> NetnsMachines:
        check_namespaces()
        sweep()
        self._sign = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sign.bind(_sign(os.getpid()))
        try:
            self.folder.mkdir()
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process inside and removes namespaces and folder; interfaces go with their namespaces."""
        for name in [*(self.host(i) for i in range(self.count)), self.switch]:
            _remove(name)
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._sign is not None:
            self._sign.close()
            self._sign = None

    def _build(self) -> None:
        hosts = [self.host(i) for i in range(self.count)]
        for host in hosts:
            run("ip", "netns", "add", host)
        if self._switched:
            run("ip", "netns", "add", self.switch)
            run("ip", "-n", self.switch, "link", "add", "name", "bridge0", "type", "bridge")
            run("ip", "-n", self.switch, "link", "set", "bridge0", "up")
            for i, host in enumerate(hosts):
                _cable(host, CARD, self.switch, f"port{i}")
                run("ip", "-n", self.switch, "link", "set", f"port{i}", "master", "bridge0", "up")
        else:  # a switch would cost every packet a second way through the kernel, on the learners' cores
            _cable(hosts[0], CARD, hosts[1], CARD)
        for i, host in enumerate(hosts):
            run("ip", "-n", host, "addr", "add", f"{self.address(i)}/24", "dev", CARD)
            run("ip", "-n", host, "link", "set", CARD, "up")
            run("ip", "-n", host, "link", "set", "lo", "up")
        self.set_rate(self.mbit)

    @property
    def _switched(self) -> bool:
        return self.count != 2

    def set_rate(self, mbit: int) -> None:
        """Every cable now carries this much, in each direction."""
        self.mbit = mbit
        limit = ("root", "tbf", "rate", f"{mbit}mbit", "burst", BURST, "latency", QUEUE)
        for i in range(self.count):
            run("tc", "-n", self.host(i), "qdisc", "replace", "dev", CARD, *limit)
            if self._switched:
                run("tc", "-n", self.switch, "qdisc", "replace", "dev", f"port{i}", *limit)

    def start(self, number: int, command: Sequence[str], env: dict[str, str]) -> subprocess.Popen[str]:
        """A process on a host, spoken to through its standard input and output."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.host(number), *command],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the process that cleans up
        )

    def sent_bytes(self) -> list[int]:
        """What each host has put on its cable so far, headers included."""
        counts = []
        for i in range(self.count):
            # a namespace has its own view of /sys, which `ip netns exec` mounts
            path = f"/sys/class/net/{CARD}/statistics/tx_bytes"
            counts.append(int(run("ip", "netns", "exec", self.host(i), "cat", path)))
        return counts


def end_with_parent() -> None:
    """The kernel ends this process when the one that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
