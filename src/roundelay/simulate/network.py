"""How long things take to travel.

Every card, port, bus and memory is a queue: what comes first goes first, at full speed. A transfer holds the sender's way out
and the receiver's way in while its bytes pass; the latency comes on top and holds nothing. A half-duplex link has one queue
for both directions, a shared one has one for all learners of a machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from roundelay.simulate.cluster import Cluster, LinkModel


class Segment:
    """One queue: free again at a time."""

    __slots__ = ("busy_s", "free_at")

    def __init__(self) -> None:
        self.free_at = self.busy_s = 0.0


class Route:
    """What a collective among some learners runs over."""

    def __init__(
        self, ways: Sequence[Segment], crossing: bool, size: int, link_s: float, load: float, latency_s: float
    ) -> None:
        self.ways, self.crossing, self.size = ways, crossing, size
        self.cpu_s_per_byte = 0.0
        self.seconds_per_byte, self.latency_s = link_s * load, latency_s
        """Load: how many of the ring's flows share the busiest way."""


class NetworkModel:
    """The links of a cluster."""

    def __init__(self, cluster: Cluster, machines: Sequence[str]) -> None:
        self.cluster = cluster
        self.names = list(machines)
        number = {name: i for i, name in enumerate(dict.fromkeys(machines))}
        self.machine = [number[name] for name in machines]
        inside, between = cluster.link.inside, cluster.link.between
        self._inside_s, self._between_s = _seconds_per_byte(inside), _seconds_per_byte(between)
        self._inside_latency, self._between_latency = inside.latency_us * 1e-6, between.latency_us * 1e-6
        self._inside = self._ways(inside)
        self._between = self._ways(between)
        self._memory = [Segment() for _ in number]
        self._memory_s = 1 / (cluster.memory.gb_per_s * 1e9)
        self._device_s = 1 / (cluster.memory.device_gb_per_s * 1e9)
        self._meeting_s = 1 / (cluster.memory.exchange_gb_per_s * 1e9)
        self.copies = self._device_s > 0.0
        """Whether the way between devices and host memory takes time."""
        self.bytes_between = 0.0
        self.bytes_inside = 0.0

    def _ways(self, link: LinkModel) -> list[tuple[Segment, Segment]]:
        """(out, in) of every learner."""
        made: dict[int, tuple[Segment, Segment]] = {}
        found = []
        for rank, machine in enumerate(self.machine):
            key = machine if link.shared else rank
            if key not in made:
                way = Segment()
                made[key] = (way, way if link.duplex == "half" else Segment())
            found.append(made[key])
        return found

    # -- from one to another -----------------------------------------------------------------------------------------

    def transfer(self, source: int, target: int, size: float, now: float) -> float:
        """When bytes that leave now have arrived."""
        if self.machine[source] == self.machine[target]:
            out, into, per_byte, latency = (
                self._inside[source][0],
                self._inside[target][1],
                self._inside_s,
                self._inside_latency,
            )
            self.bytes_inside += size
        else:
            out, into, per_byte, latency = (
                self._between[source][0],
                self._between[target][1],
                self._between_s,
                self._between_latency,
            )
            self.bytes_between += size
        start = max(now, out.free_at, into.free_at)
        seconds = size * per_byte
        out.free_at = into.free_at = start + seconds
        out.busy_s += seconds
        if into is not out:
            into.busy_s += seconds
        return start + seconds + latency

    # -- among many --------------------------------------------------------------------------------------------------

    def route(self, ranks: Sequence[int]) -> Route:
        """A ring over these learners, machine by machine."""
        machines = [self.machine[r] for r in ranks]
        crossing = len(set(machines)) > 1
        link, table = (self.cluster.link.between, self._between) if crossing else (self.cluster.link.inside, self._inside)
        per_byte = self._between_s if crossing else self._inside_s
        latency = max(self._between_latency, self._inside_latency) if crossing else self._inside_latency
        if crossing:
            # one flow leaves each machine and one enters it, however many learners it has
            load = 2.0 if link.duplex == "half" else 1.0
            most = max(machines.count(m) for m in set(machines))
            flows = (most - 1 if self.cluster.link.inside.shared else 1.0) if most > 1 else 0.0
            flows *= 2.0 if self.cluster.link.inside.duplex == "half" else 1.0
            per_byte = max(per_byte * load, self._inside_s * flows)
            load = 1.0
            ways = [way for m in dict.fromkeys(machines) for way in table[ranks[machines.index(m)]]]
        else:
            load = float(len(ranks)) if link.shared else 1.0
            load *= 2.0 if link.duplex == "half" and not link.shared else 1.0
            ways = [way for r in ranks for way in table[r]]
        route = Route(list(dict.fromkeys(ways)), crossing, len(ranks), per_byte, load, latency)
        route.cpu_s_per_byte = link.cpu_s_per_gb * 1e-9
        return route

    def cpu_seconds(self, source: int, target: int, size: float) -> float:
        """What one side of an exchange of so many bytes each way costs it on its core."""
        link = self.cluster.link
        inside = self.machine[source] == self.machine[target]
        return size * 1e-9 * (link.inside if inside else link.between).cpu_s_per_gb

    def all_reduce(self, route: Route, size: float, start: float, rounds: float = 2.0) -> float:
        """When a sum (rounds=1) or a sum that everybody gets (rounds=2) is there: bytes pass as in a ring."""
        n = route.size
        start = max(start, *(way.free_at for way in route.ways)) if len(route.ways) > 1 else max(start, route.ways[0].free_at)
        seconds = rounds * (n - 1) / n * size * route.seconds_per_byte
        for way in route.ways:
            way.free_at = start + seconds
            way.busy_s += seconds
        if route.crossing:
            self.bytes_between += rounds * (n - 1) * size
        else:
            self.bytes_inside += rounds * (n - 1) * size
        return start + seconds + rounds * (n - 1) * route.latency_s

    # -- host memory ---------------------------------------------------------------------------------------------------

    def device_copy(self, rank: int, size: float, now: float) -> float:
        """When a vector has gone from host memory to the learner's device or back."""
        end = now + size * self._device_s
        return max(end, self._through_memory(rank, size, now))

    def meeting_in_place(self, rank: int, size: float, now: float) -> float:
        """When two vectors of a machine have been averaged where they lie."""
        end = now + 2 * size * self._meeting_s
        return max(end, self._through_memory(rank, 4 * size, now)) if self._memory_s else end

    def _through_memory(self, rank: int, size: float, now: float) -> float:
        if self._memory_s == 0.0:
            return now
        way = self._memory[self.machine[rank]]
        start = max(now, way.free_at)
        seconds = size * self._memory_s
        way.free_at = start + seconds
        way.busy_s += seconds
        return way.free_at


def _seconds_per_byte(link: LinkModel) -> float:
    return 8 / (link.gbit_per_s * 1e9)
