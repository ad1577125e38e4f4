"""A switch in user space: one TAP device per network namespace, with delay, loss, limited rates, cut cables and TCP resets.

Run it alone to have machines for experiments, and change the network while they run:

    sudo python -m benchmarks.vswitch --hosts 3 --socket /tmp/switch
    sudo python -m benchmarks.vswitch --socket /tmp/switch --send '{"delay_ms": 50}'

A command is a JSON object. delay_ms (one way), loss (share of packets) and rate_kbit apply to what every machine sends, or with
"port": N to one machine; 0 removes them. {"cut": N} makes machine N vanish, {"join": N} connects it again. {"block": [M, N]}
drops all packets between two machines, {"unblock": [M, N]} no longer does. {"reset": COUNT}
closes TCP connections by forged packets, each in both directions; with "port" only those of one machine. {"stats": true} counts
packets. The answer is a JSON object.

Packets are bundles of TCP segments (TSO), so that a model passes in a few reads; with offload=False they are single frames.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.common import log, parser, run_main
from benchmarks.namespaces import CARD, PREFIX, check_namespaces, end_with_parent, run, sweep
from benchmarks.namespaces import _remove as remove_namespace
from benchmarks.namespaces import _sign as sign_of

TUNSETIFF, TUNSETOFFLOAD, TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
CLONE_NEWNET = 0x40000000
VNET = 10
"""Bytes of the header before each packet that says which checksums and segments are missing."""
QUEUE_S = 0.3
"""The longest a packet waits before a cable of limited rate, its own time included; above that it is dropped."""
_libc = ctypes.CDLL(None, use_errno=True)
_signs: dict[int, socket.socket] = {}
"""By process: the socket that shows other processes that the namespaces are in use."""


def enter_namespace(name: str) -> None:
    """Move this process to a network namespace."""
    with open(f"/run/netns/{name}") as file:
        if _libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {name} failed")


def open_tap(namespace: str, offload: bool) -> int:
    """Create the TAP device of a namespace and return its descriptor. Moves this process there and back."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        enter_namespace(namespace)
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", CARD.encode(), flags))
        fcntl.ioctl(fd, TUNSETVNETHDRSZ, struct.pack("i", VNET))
        fcntl.ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 if offload else 0)
        return fd
    finally:
        _libc.setns(home, CLONE_NEWNET)
        os.close(home)


class Port:
    """The cable of one machine."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.delay_s = self.loss = self.rate = 0.0
        """Seconds one way, share of lost packets, bytes per second (0: no limit)."""
        self.cut = False
        self.free_at = 0.0
        self.last_release = 0.0
        self.packets = self.bytes = self.dropped = 0


class Switch:
    """Forward packets between ports until the process ends."""

    def __init__(self, fds: Sequence[int], control: socket.socket, seed: int = 0) -> None:
        self.ports = [Port(fd) for fd in fds]
        self.control = control
        self.rng = random.Random(seed)
        self.queue: list[tuple[float, int, int, bytes]] = []
        """Delayed packets: time, number, ports of destination as bits, packet."""
        self.number = 0
        self.blocked: set[tuple[int, int]] = set()
        """Pairs of ports, in both orders, between which all packets are dropped."""
        self.flows: dict[tuple[bytes, bytes, int, int], tuple[int, int, float]] = {}
        """TCP flow -> next sequence number, acknowledged number of the other direction, time of the last packet."""

    def serve(self) -> None:
        by_fd = {port.fd: index for index, port in enumerate(self.ports)}
        inputs: list[Any] = [*by_fd, self.control]
        while True:
            wait = None if not self.queue else max(0.0, self.queue[0][0] - time.monotonic())
            for ready in select.select(inputs, [], [], wait)[0]:  # epoll waits whole milliseconds
                if ready is self.control:
                    self._answer()
                else:
                    self._read(by_fd[ready])
            if self.queue:
                self._release(time.monotonic())

    def _read(self, source: int) -> None:
        port = self.ports[source]
        for _ in range(64):
            try:
                packet = os.read(port.fd, 70000)
            except BlockingIOError:
                return
            port.packets += 1
            port.bytes += len(packet)
            target = self._target(packet, source)
            if port.cut or not target:
                port.dropped += port.cut
                continue
            if port.loss and self.rng.random() < port.loss:
                port.dropped += 1
                continue
            self._note_flow(packet)
            if port.delay_s or port.rate:
                self._delay(port, target, packet)
            else:
                self._send(target, packet)

    def _target(self, packet: bytes, source: int) -> int:
        """Return the ports a packet goes to, as bits. The last byte of an address is the number of its machine."""
        if packet[VNET] & 1:
            return ((1 << len(self.ports)) - 1) & ~(1 << source)
        number = packet[VNET + 5] - 1
        return 1 << number if 0 <= number < len(self.ports) and number != source else 0

    def _delay(self, port: Port, target: int, packet: bytes) -> None:
        now = time.monotonic()
        leaves = now
        if port.rate:
            waits = max(0.0, port.free_at - now)
            if waits and waits + len(packet) / port.rate > QUEUE_S:  # a limit in bytes, as that of `tc tbf`
                port.dropped += 1
                return
            leaves = port.free_at = max(now, port.free_at) + len(packet) / port.rate
        self.number += 1
        port.last_release = max(port.last_release, leaves + port.delay_s)  # a cable does not reorder
        heapq.heappush(self.queue, (port.last_release, self.number, target, packet))

    def _release(self, now: float) -> None:
        while self.queue and self.queue[0][0] <= now:
            _, _, target, packet = heapq.heappop(self.queue)
            self._send(target, packet)

    def _send(self, target: int, packet: bytes) -> None:
        for index, port in enumerate(self.ports):
            if target >> index & 1 and not port.cut and (packet[VNET + 11] - 1, index) not in self.blocked:
                try:
                    os.write(port.fd, packet)
                except OSError:  # a full queue of the kernel loses packets, as a network card does
                    port.dropped += 1

    # -- TCP resets ------------------------------------------------------------------------------------------------

    def _note_flow(self, packet: bytes) -> None:
        ip = VNET + 14
        if len(packet) < ip + 40 or packet[ip - 2 : ip] != b"\x08\x00" or packet[ip + 9] != 6:
            return
        tcp = ip + (packet[ip] & 15) * 4
        source_port, target_port, seq, ack = struct.unpack_from("!HHII", packet, tcp)
        flags = packet[tcp + 13]
        key = (packet[ip + 12 : ip + 16], packet[ip + 16 : ip + 20], source_port, target_port)
        if flags & 0x05:  # FIN, RST
            self.flows.pop(key, None)
            return
        length = struct.unpack_from("!H", packet, ip + 2)[0] - (packet[ip] & 15) * 4 - (packet[tcp + 12] >> 4) * 4
        following = seq + length + (flags >> 1 & 1) & 0xFFFFFFFF
        known_seq = self.flows.get(key, (following, 0, 0.0))[0]
        if (following - known_seq) & 0x80000000:  # sent again
            following = known_seq
        self.flows[key] = (following, ack, time.monotonic())

    def reset(self, count: int, port: int | None) -> int:
        """Forge resets in both directions of up to `count` established connections, chosen at random. Return the number."""
        address = None if port is None else socket.inet_aton(address_of(port))
        live = [
            key
            for key in self.flows
            if key[0] < key[1] and (key[1], key[0], key[3], key[2]) in self.flows and (address is None or address in key[:2])
        ]
        chosen = self.rng.sample(live, min(count, len(live)))
        for key in chosen:
            back = (key[1], key[0], key[3], key[2])
            for one, other in ((key, back), (back, key)):
                # a receiver takes a reset with exactly the sequence number that it expects
                for seq in {self.flows[one][0], self.flows[other][1]}:
                    self._send(1 << (one[1][3] - 1), reset_packet(one, seq))
            del self.flows[key], self.flows[back]
        return len(chosen)

    # -- commands --------------------------------------------------------------------------------------------------

    def _answer(self) -> None:
        data, sender = self.control.recvfrom(65536)
        try:
            answer = self.command(json.loads(data))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            answer = {"error": repr(error)}
        if sender:
            with suppress(OSError):
                self.control.sendto(json.dumps(answer).encode(), sender)

    def command(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry out one command."""
        number = command.get("port")
        chosen = self.ports if number is None else [self.ports[number]]
        for port in chosen:
            port.delay_s = command.get("delay_ms", port.delay_s * 1000) / 1000
            port.loss = command.get("loss", port.loss)
            port.rate = command.get("rate_kbit", port.rate / 125) * 125
        for key in ("cut", "join"):
            if key in command:
                self.ports[command[key]].cut = key == "cut"
        for key, change in (("block", self.blocked.update), ("unblock", self.blocked.difference_update)):
            if key in command:
                a, b = command[key]
                change([(a, b), (b, a)])
        answer: dict[str, Any] = {"ok": True}
        if "reset" in command:
            answer["reset"] = self.reset(int(command["reset"]), number)
        if command.get("stats"):
            answer["stats"] = [{"packets": p.packets, "bytes": p.bytes, "dropped": p.dropped} for p in self.ports]
            answer["flows"] = len(self.flows)
        return answer


def checksum(data: bytes) -> int:
    """Return the Internet checksum."""
    total = sum(struct.unpack(f"!{(len(data) + 1) // 2}H", data + b"\0" * (len(data) % 2)))
    total = (total >> 16) + (total & 0xFFFF)
    return ~(total + (total >> 16)) & 0xFFFF


def reset_packet(flow: tuple[bytes, bytes, int, int], seq: int) -> bytes:
    """Return the frame of a TCP reset, as if the source of a flow had sent it."""
    source, target, source_port, target_port = flow
    tcp = struct.pack("!HHIIBBHHH", source_port, target_port, seq, 0, 5 << 4, 0x04, 0, 0, 0)
    value = checksum(source + target + struct.pack("!BBH", 0, 6, len(tcp)) + tcp)
    tcp = tcp[:16] + struct.pack("!H", value) + tcp[18:]
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(tcp), 0, 0x4000, 64, 6, 0, source, target)
    ip = ip[:10] + struct.pack("!H", checksum(ip)) + ip[12:]
    ethernet = mac_of(target[3] - 1) + mac_of(source[3] - 1) + b"\x08\x00"
    return bytes(VNET) + ethernet + ip + tcp


def mac_of(number: int) -> bytes:
    return bytes((2, 0, 0, 0, 0, number + 1))


def address_of(number: int) -> str:
    return f"10.78.0.{number + 1}"


class SwitchedMachines:
    """`count` network namespaces on a switch that runs in a process of its own. A context manager; needs root."""

    def __init__(self, count: int, path: Path | None = None, *, offload: bool = True) -> None:
        self.count, self.offload = count, offload
        self.pid, self._maker = 0, os.getpid()
        self._folder = None if path else Path(tempfile.mkdtemp(prefix="vswitch-"))
        self.path = path or (self._folder or Path()) / "socket"

    def host(self, number: int) -> str:
        """Return the name of a machine's namespace."""
        return f"{PREFIX}-{self._maker}-{number}"

    def address(self, number: int) -> str:
        return address_of(number)

    def __enter__(self) -> SwitchedMachines:
        os.environ["PATH"] += ":/usr/sbin:/sbin"
        check_namespaces()
        sweep()
        if os.getpid() not in _signs:  # kept to the end of the process: children that inherit it may outlive this object
            _signs[os.getpid()] = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            _signs[os.getpid()].bind(sign_of(os.getpid()))
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def _build(self) -> None:
        fds = []
        for number in range(self.count):
            host = self.host(number)
            run("ip", "netns", "add", host)
            fds.append(open_tap(host, self.offload))
            mac = ":".join(f"{byte:02x}" for byte in mac_of(number))
            run("ip", "-n", host, "link", "set", CARD, "address", mac, "txqueuelen", "2000", "up")
            run("ip", "-n", host, "addr", "add", f"{self.address(number)}/24", "dev", CARD)
            run("ip", "-n", host, "link", "set", "lo", "up")
        control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with suppress(FileNotFoundError):
            self.path.unlink()
        control.bind(str(self.path))
        self.pid = os.fork()
        if self.pid == 0:
            try:
                end_with_parent()
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                with suppress(OSError):
                    os.nice(-5)
                Switch(fds, control).serve()
            finally:
                os._exit(1)
        control.close()
        for fd in fds:
            os.close(fd)

    def send(self, **command: Any) -> dict[str, Any]:
        """Send a command to the switch and return its answer."""
        return send(self.path, command)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the switch and every process in the namespaces, and remove them."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            self.pid = 0
        for number in range(self.count):
            remove_namespace(self.host(number))
        with suppress(OSError):
            self.path.unlink()
        if self._folder:
            with suppress(OSError):
                self._folder.rmdir()


def send(path: Path, command: dict[str, Any]) -> dict[str, Any]:
    """Send a command to a switch and return its answer."""
    own = f"{path}.{os.getpid()}"  # abstract addresses would not reach another network namespace
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
            client.bind(own)
            client.settimeout(10)
            client.sendto(json.dumps(command).encode(), str(path))
            answer: dict[str, Any] = json.loads(client.recv(65536))
            return answer
    finally:
        with suppress(OSError):
            os.unlink(own)


def main(argv: Sequence[str]) -> int:
    p = parser("vswitch", __doc__, "sudo python -m benchmarks.vswitch --hosts 3 --socket /tmp/switch")
    p.add_argument("--hosts", type=int, default=3)
    p.add_argument("--socket", type=Path, default=Path("/tmp/roundelay-switch"))
    p.add_argument("--no-offload", action="store_true", help="single frames instead of bundles")
    p.add_argument("--send", default="", metavar="JSON", help="send a command to a running switch and print its answer")
    args = p.parse_args(argv)
    if args.send:
        print(json.dumps(send(args.socket, json.loads(args.send))))
        return 0
    with SwitchedMachines(args.hosts, args.socket, offload=not args.no_offload) as machines:
        hosts = [{"namespace": machines.host(n), "address": machines.address(n)} for n in range(args.hosts)]
        print(json.dumps({"hosts": hosts, "socket": str(args.socket)}), flush=True)
        log("running; end it with Ctrl-C")
        signal.pause()
    return 0


if __name__ == "__main__":
    run_main(main)
