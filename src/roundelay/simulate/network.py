"""The time that transfers take.

Every network card, port, bus and memory is a first-come-first-served queue at full speed. A transfer occupies the sender's
outgoing and the receiver's incoming queue while its bytes pass; latency is added and occupies nothing. A half-duplex link
has one queue for both directions; a shared link has one for all learners of a machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from roundelay.simulate.cluster import Cluster, LinkModel


class Segment:
    """One queue: when it is free again, and how long it was busy in total."""

    __slots__ = ("busy_s", "free_at")

    def __init__(self) -> None:
        self.free_at = self.busy_s = 0.0


class Route:
    """The segments of a collective among some learners, and their cost per byte."""

    def __init__(
        self, segments: Sequence[Segment], crossing: bool, size: int, link_s: float, load: float, latency_s: float
    ) -> None:
        """`load` is the number of flows of the ring that share the busiest segment."""
        self.segments, self.crossing, self.size = segments, crossing, size
        self.cpu_s_per_byte = 0.0
        self.seconds_per_byte, self.latency_s = link_s * load, latency_s


class NetworkModel:
    """The links and memories of a cluster. All methods take and return virtual times in seconds."""

    def __init__(self, cluster: Cluster, machines: Sequence[str]) -> None:
        self.cluster = cluster
        self.names = list(machines)
        number = {name: i for i, name in enumerate(dict.fromkeys(machines))}
        self.machine = [number[name] for name in machines]
        inside, between = cluster.link.inside, cluster.link.between
        self._inside_s, self._between_s = _seconds_per_byte(inside), _seconds_per_byte(between)
        self._inside_latency, self._between_latency = inside.latency_us * 1e-6, between.latency_us * 1e-6
        self._inside = self._segments(inside)
        self._between = self._segments(between)
        self._memory = [Segment() for _ in number]
        self._memory_s = 1 / (cluster.memory.gb_per_s * 1e9)
        self._device_s = 1 / (cluster.memory.device_gb_per_s * 1e9)
        self._exchange_s = 1 / (cluster.memory.exchange_gb_per_s * 1e9)
        self.copies = self._device_s > 0.0
        """True if copies between devices and host memory take time."""
        self.bytes_between = 0.0
        self.bytes_inside = 0.0

    def _segments(self, link: LinkModel) -> list[tuple[Segment, Segment]]:
        """Return the outgoing and incoming segment of every learner."""
        by_key: dict[int, tuple[Segment, Segment]] = {}
        segments = []
        for rank, machine in enumerate(self.machine):
            key = machine if link.shared else rank
            if key not in by_key:
                outgoing = Segment()
                by_key[key] = (outgoing, outgoing if link.duplex == "half" else Segment())
            segments.append(by_key[key])
        return segments

    # -- point to point ----------------------------------------------------------------------------------------------

    def transfer(self, source: int, target: int, size: float, now: float) -> float:
        """Send `size` bytes at `now` and return when they have arrived. A message of 0 bytes waits for no other message.

        Flows share a link packet by packet, so a small message passes a large one.
        """
        if self.machine[source] == self.machine[target]:
            table, per_byte, latency = self._inside, self._inside_s, self._inside_latency
            self.bytes_inside += size
        else:
            table, per_byte, latency = self._between, self._between_s, self._between_latency
            self.bytes_between += size
        if not size:
            return now + latency
        outgoing, incoming = table[source][0], table[target][1]
        start = max(now, outgoing.free_at, incoming.free_at)
        seconds = size * per_byte
        outgoing.free_at = incoming.free_at = start + seconds
        outgoing.busy_s += seconds
        if incoming is not outgoing:
            incoming.busy_s += seconds
        return start + seconds + latency

    # -- collectives -------------------------------------------------------------------------------------------------

    def route(self, ranks: Sequence[int]) -> Route:
        """Return the route of a ring over these learners, machine by machine."""
        machines = [self.machine[r] for r in ranks]
        crossing = len(set(machines)) > 1
        link, table = (self.cluster.link.between, self._between) if crossing else (self.cluster.link.inside, self._inside)
        per_byte = self._between_s if crossing else self._inside_s
        latency = max(self._between_latency, self._inside_latency) if crossing else self._inside_latency
        if crossing:
            # one flow leaves each machine and one enters it, whatever its number of learners
            load = 2.0 if link.duplex == "half" else 1.0
            most = max(machines.count(m) for m in set(machines))
            flows = (most - 1 if self.cluster.link.inside.shared else 1.0) if most > 1 else 0.0
            flows *= 2.0 if self.cluster.link.inside.duplex == "half" else 1.0
            per_byte = max(per_byte * load, self._inside_s * flows)
            load = 1.0
            segments = [segment for m in dict.fromkeys(machines) for segment in table[ranks[machines.index(m)]]]
        else:
            load = float(len(ranks)) if link.shared else 1.0
            load *= 2.0 if link.duplex == "half" and not link.shared else 1.0
            segments = [segment for r in ranks for segment in table[r]]
        route = Route(list(dict.fromkeys(segments)), crossing, len(ranks), per_byte, load, latency)
        route.cpu_s_per_byte = link.cpu_s_per_gb * 1e-9
        return route

    def cpu_seconds(self, source: int, target: int, size: float) -> float:
        """Return the CPU seconds that an exchange of `size` bytes in each direction costs one side."""
        link = self.cluster.link
        inside = self.machine[source] == self.machine[target]
        return size * 1e-9 * (link.inside if inside else link.between).cpu_s_per_gb

    def all_reduce(self, route: Route, size: float, start: float, rounds: float = 2.0) -> float:
        """Return the end of a ring reduce (rounds=1) or all-reduce (rounds=2) that starts at `start`."""
        n = route.size
        start = max(start, max(segment.free_at for segment in route.segments))
        seconds = rounds * (n - 1) / n * size * route.seconds_per_byte
        for segment in route.segments:
            segment.free_at = start + seconds
            segment.busy_s += seconds
        if route.crossing:
            self.bytes_between += rounds * (n - 1) * size
        else:
            self.bytes_inside += rounds * (n - 1) * size
        return start + seconds + rounds * (n - 1) * route.latency_s

    # -- host memory ---------------------------------------------------------------------------------------------------

    def device_copy(self, rank: int, size: float, now: float) -> float:
        """Return the end of a copy between host memory and the learner's device."""
        end = now + size * self._device_s
        return max(end, self._use_memory(rank, size, now))

    def exchange_in_place(self, rank: int, size: float, now: float) -> float:
        """Return the end of a pair average of two vectors in the memory of one machine."""
        end = now + 2 * size * self._exchange_s
        return max(end, self._use_memory(rank, 4 * size, now)) if self._memory_s else end

    def _use_memory(self, rank: int, size: float, now: float) -> float:
        if self._memory_s == 0.0:
            return now
        memory = self._memory[self.machine[rank]]
        start = max(now, memory.free_at)
        seconds = size * self._memory_s
        memory.free_at = start + seconds
        memory.busy_s += seconds
        return memory.free_at


def _seconds_per_byte(link: LinkModel) -> float:
    return 8 / (link.gbit_per_s * 1e9)
