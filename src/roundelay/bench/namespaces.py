"""Machines made of network namespaces: hosts around a switch, every cable with the speed that was asked for.

Each host is a namespace with one interface; the switch is a namespace with a bridge. Both ends of a cable are held to the
rate by a token bucket, so each host sends and receives at most that much, and the queue before the cable is a few
milliseconds long: a small message is not held up for long behind a model that is on its way.

Everything is named after the process that made it. What a killed process left behind is cleared away by the next one.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from types import TracebackType

from roundelay.errors import UsageError

PREFIX = "roundelay"
BURST = "128kb"
"""What may leave at once: two of the largest packets the kernel hands to an interface."""
QUEUE = "20ms"
"""The longest a packet waits before the cable; above that it is dropped and TCP slows down."""
CARD = "lan0"
"""The name of a host's interface."""


def check() -> None:
    """Says what is missing to make machines here."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise UsageError(f"the command '{tool}' is not installed", where="bench network", do="install iproute2")
    if os.geteuid() != 0:
        raise UsageError(
            "only root may make network namespaces", where="bench network", do="run it with sudo, or as root in a container"
        )


def run(*command: str) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UsageError(
            f"'{' '.join(command)}' failed: {done.stderr.strip() or done.stdout.strip()}",
            where="bench network",
            do="the kernel must allow network namespaces, veth, bridges and the tbf queue (in a container: --privileged)",
        )
    return done.stdout


def sweep() -> list[str]:
    """Removes what killed processes left behind; returns the namespaces that went."""
    gone = []
    for line in run("ip", "netns", "list").splitlines():
        name = line.split()[0] if line.split() else ""
        parts = name.split("-")
        if len(parts) == 3 and parts[0] == PREFIX and parts[1].isdigit() and not _maker_lives(int(parts[1])):
            _remove(name)
            gone.append(name)
    return gone


def _sign(pid: int) -> str:
    return f"\0{PREFIX}-namespaces-{pid}"


def _maker_lives(pid: int) -> bool:
    """Whoever makes namespaces holds a socket with an abstract name; the kernel frees it with the process."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(_sign(pid))
        except OSError:
            return True
    return False


def _remove(name: str) -> None:
    found = subprocess.run(("ip", "netns", "pids", name), capture_output=True, text=True, check=False)
    for pid in found.stdout.split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue
    subprocess.run(("ip", "netns", "del", name), capture_output=True, check=False)


class Machines:
    """`count` hosts around a switch, each on a cable of `mbit` Mbit/s. A context manager."""

    def __init__(self, count: int, mbit: int) -> None:
        self.count, self.mbit = count, mbit
        self._sign: socket.socket | None = None

    def host(self, number: int) -> str:
        return f"{PREFIX}-{os.getpid()}-{number}"

    @property
    def switch(self) -> str:
        return f"{PREFIX}-{os.getpid()}-switch"

    def address(self, number: int) -> str:
        return f"10.77.0.{number + 1}"

    def __enter__(self) -> Machines:
        check()
        sweep()
        self._sign = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sign.bind(_sign(os.getpid()))
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process inside and removes the namespaces; their interfaces go with them."""
        for name in [*(self.host(i) for i in range(self.count)), self.switch]:
            _remove(name)
        if self._sign is not None:
            self._sign.close()
            self._sign = None

    def _build(self) -> None:
        switch = self.switch
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "name", "bridge0", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "bridge0", "up")
        for i in range(self.count):
            host, port = self.host(i), f"port{i}"
            run("ip", "netns", "add", host)
            run("ip", "link", "add", "name", CARD, "netns", host, "type", "veth", "peer", "name", port, "netns", switch)
            run("ip", "-n", switch, "link", "set", port, "master", "bridge0", "up")
            run("ip", "-n", host, "addr", "add", f"{self.address(i)}/24", "dev", CARD)
            run("ip", "-n", host, "link", "set", CARD, "up")
            run("ip", "-n", host, "link", "set", "lo", "up")
        self.set_rate(self.mbit)

    def set_rate(self, mbit: int) -> None:
        """Every cable now carries this much, in each direction."""
        self.mbit = mbit
        limit = ("root", "tbf", "rate", f"{mbit}mbit", "burst", BURST, "latency", QUEUE)
        for i in range(self.count):
            run("tc", "-n", self.host(i), "qdisc", "replace", "dev", CARD, *limit)
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
        found = []
        for i in range(self.count):
            # a namespace has its own view of /sys, which `ip netns exec` mounts
            path = f"/sys/class/net/{CARD}/statistics/tx_bytes"
            found.append(int(run("ip", "netns", "exec", self.host(i), "cat", path)))
        return found


def end_with_parent() -> None:
    """The kernel ends this process when the one that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
