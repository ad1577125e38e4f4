"""Description of a simulated cluster: machines, learners and links, from a TOML file or a preset.

Units are part of the names: s seconds, us microseconds, gbit gigabits (10^9), gb gigabytes (10^9 bytes). A missing cost is
zero and a missing limit is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from roundelay import config
from roundelay.core.settings import setting
from roundelay.errors import UsageError, did_you_mean

FOREVER = math.inf
LARGEST = 1e12
"""Finite numbers of a cluster are 0 or between 1 / LARGEST and LARGEST, so that no time overflows."""
MAX_LEARNERS = 1 << 17
PRESET_FOLDER = Path(__file__).with_name("clusters")


@dataclass(frozen=True)
class MachineGroup:
    """N equal machines."""

    count: int = setting(1, minimum=1, help="Number of machines.")
    learners: int = setting(1, minimum=1, help="Learners on each machine.")
    memory_gb: float = setting(FOREVER, above=0, infinite=True, help="Memory of each machine, shared by its learners.")
    speed: float = setting(1.0, above=0, infinite=True, help="Speed relative to [learner]; 0.5 computes half as fast.")


@dataclass(frozen=True)
class SpeedModel:
    """Variation of a learner's compute time from step to step, around the same mean."""

    kind: str = setting(
        "constant",
        choices=("constant", "gaussian", "heavy_tail"),
        help="constant, gaussian (log-normal factor), or heavy_tail (Pareto: a few very long steps).",
    )
    spread: float = setting(
        0.05, minimum=0, help="gaussian: standard deviation of the logarithm. heavy_tail: mean excess over the usual time."
    )
    tail: float = setting(2.5, help="heavy_tail: Pareto index, above 1; smaller values make the longest steps longer.")


@dataclass(frozen=True)
class ComputeModel:
    """Compute time and memory of one learner."""

    seconds_per_sample: float = setting(0.0, minimum=0, help="Seconds of forward and backward per sample.")
    seconds_per_step: float = setting(0.0, minimum=0, help="Fixed seconds per step: kernel launches, the optimizer.")
    backward_share: float = setting(0.667, minimum=0, maximum=1, help="Share of the compute time in which gradients are sent.")
    memory_gb: float = setting(FOREVER, above=0, infinite=True, help="Memory of the learner's device.")
    jitter: SpeedModel = setting(SpeedModel(), help="Variation of the compute time.")


@dataclass(frozen=True)
class LinkModel:
    """One kind of network link."""

    gbit_per_s: float = setting(FOREVER, above=0, infinite=True, help="Bandwidth.")
    latency_us: float = setting(0.0, minimum=0, help="Latency.")
    duplex: str = setting("full", choices=("full", "half"), help="full: both directions at once; half: one at a time.")
    cpu_s_per_gb: float = setting(
        0.0, minimum=0, help="CPU seconds that a learner loses per GB it exchanges while it computes."
    )
    shared: bool = setting(True, help="One link per machine, shared by its learners; false: one link per learner.")


@dataclass(frozen=True)
class LinkModels:
    """Links inside a machine and between machines."""

    inside: LinkModel = setting(LinkModel(shared=False), help="Links between learners of one machine.")
    between: LinkModel = setting(LinkModel(), help="Links between machines.")


@dataclass(frozen=True)
class MemoryModel:
    """Host memory of a machine, which shared vectors pass through."""

    gb_per_s: float = setting(FOREVER, above=0, infinite=True, help="Bandwidth of all learners and exchanges of a machine.")
    device_gb_per_s: float = setting(
        FOREVER, above=0, infinite=True, help="Bandwidth between device and host; shared weights are copied twice per step."
    )
    exchange_gb_per_s: float = setting(
        FOREVER, above=0, infinite=True, help="Speed of one pair average inside a machine, in bytes of both vectors."
    )
    contention: float = setting(
        0.0, minimum=0, help="Share of an exchange's time that its learners lose; 1 if exchanges run on the learners' cores."
    )


@dataclass(frozen=True)
class LoaderModel:
    """Data loading."""

    samples_per_s: float = setting(
        FOREVER, above=0, infinite=True, help="Samples per second and learner, loaded in the background, one batch ahead."
    )


@dataclass(frozen=True)
class StragglerModel:
    """A learner or a machine that computes `factor` times as long during an interval."""

    factor: float = setting(above=0, help="Factor on the compute time.")
    learner: int = setting(-1, help="Rank of the learner, if not a machine.")
    machine: int = setting(-1, help="Number of the machine, if not a learner.")
    from_s: float = setting(0.0, minimum=0, help="Start of the interval in seconds.")
    to_s: float = setting(FOREVER, help="End of the interval in seconds.")


@dataclass(frozen=True)
class Failure:
    """A learner or a machine that fails."""

    at_s: float = setting(minimum=0, help="Time of the failure in seconds.")
    learner: int = setting(-1, help="Rank of the learner, if not a machine.")
    machine: int = setting(-1, help="Number of the machine, if not a learner.")


@dataclass(frozen=True)
class Cluster:
    """Machines, learners, links and faults of a simulated cluster."""

    name: str = setting("cluster", help="Name of the cluster.")
    about: str = setting("", help="One line for roundelay list clusters.")
    machines: tuple[MachineGroup, ...] = setting((MachineGroup(),), help="Groups of equal machines.")
    learner: ComputeModel = setting(ComputeModel(), help="Compute model of a learner.")
    link: LinkModels = setting(LinkModels(), help="Network links.")
    memory: MemoryModel = setting(MemoryModel(), help="Host memory.")
    loader: LoaderModel = setting(LoaderModel(), help="Data loading.")
    straggler: tuple[StragglerModel, ...] = setting((), help="Stragglers.")
    failures: tuple[Failure, ...] = setting((), help="Failures.")
    sources: dict[str, str] = setting(factory=dict, help="Where each number comes from and how certain it is.")

    @property
    def learners(self) -> int:
        return sum(m.count * m.learners for m in self.machines)

    def machine_names(self) -> list[str]:
        """Return the machine of each learner, by rank."""
        names: list[str] = []
        number = 0
        for kind in self.machines:
            for _ in range(kind.count):
                names += [f"machine-{number}"] * kind.learners
                number += 1
        return names

    def speeds(self) -> list[float]:
        """Return the speed of each learner relative to [learner], by rank."""
        return [kind.speed for kind in self.machines for _ in range(kind.count * kind.learners)]

    def first(self, learners: int) -> Cluster:
        """Return the cluster reduced to its first N learners."""
        if learners < 1 or learners > self.learners:
            raise UsageError(
                f"learners must be 1 to {self.learners} on cluster '{self.name}' (got {learners})",
                where="learners",
                hint=f"give 1 to {self.learners}, or describe a larger cluster",
            )
        kept: list[MachineGroup] = []
        for kind in self.machines:
            whole = min(kind.count, learners // kind.learners) if kind.learners else 0
            if whole:
                kept.append(replace(kind, count=whole))
                learners -= whole * kind.learners
            if learners and whole < kind.count:
                kept.append(replace(kind, count=1, learners=learners))
                learners = 0
            if not learners:
                break
        smaller = replace(self, machines=tuple(kept))
        size, names = smaller.learners, len(set(smaller.machine_names()))
        return replace(
            smaller,
            straggler=tuple(s for s in self.straggler if s.learner < size and s.machine < names),
            failures=tuple(f for f in self.failures if f.learner < size and f.machine < names),
        )


# -- loading -----------------------------------------------------------------------------------------------------------


def load(source: str | Path) -> Cluster:
    """Return the cluster of a TOML file, or a preset by name."""
    name = str(source)
    path = PRESET_FOLDER / f"{name}.toml" if name in presets() else Path(name)
    if not name.endswith(".toml") and not path.exists():
        raise UsageError(
            f"unknown cluster '{name}'",
            where="CLUSTER",
            hint=f"{did_you_mean(name, presets())} or give the path of a .toml file (roundelay list clusters)",
        )
    tree, origins = config.read_toml(path)
    return _checked({"name": path.stem, **tree}, str(path), origins)


def presets() -> list[str]:
    """Return the names of the clusters in the package."""
    return sorted(path.stem for path in PRESET_FOLDER.glob("*.toml"))


def from_tree(tree: Mapping[str, Any], where: str = "cluster") -> Cluster:
    """Return a cluster from nested dicts, with all checks of a file."""
    return _checked(tree, where, {})


def _checked(tree: Mapping[str, Any], where: str, origins: Mapping[str, str]) -> Cluster:
    cluster = config.build(Cluster, tree, where, origins)
    check(cluster, where)
    return cluster


def _finite_numbers(tree: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Yield the dotted key and the value of every finite float of nested dicts and lists."""
    if isinstance(tree, float) and math.isfinite(tree):
        yield key, tree
    elif isinstance(tree, dict):
        for name, value in tree.items():
            yield from _finite_numbers(value, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _finite_numbers(value, key)


def check(cluster: Cluster, where: str = "cluster") -> None:
    """Raise a UsageError if settings contradict each other. Single values are checked when they are loaded."""
    if not cluster.machines:
        raise UsageError("[[machines]] must not be empty", where=where, hint="add [[machines]] with count and learners")
    if cluster.learners > MAX_LEARNERS:
        raise UsageError(
            f"a cluster must have at most {MAX_LEARNERS} learners (got {Decimal(cluster.learners):.3g})",
            where=where,
            hint="lower count or learners",
        )
    for key, value in _finite_numbers(asdict(cluster)):
        if value and not 1 / LARGEST <= abs(value) <= LARGEST:
            raise UsageError(
                f"{key} must be 0 or from {1 / LARGEST:g} to {LARGEST:g} (got {value:.3g})", where=where, hint="check the unit"
            )
    jitter = cluster.learner.jitter
    if jitter.kind == "heavy_tail" and jitter.tail <= 1:
        raise UsageError(
            f"[learner.jitter] tail must be > 1 (got {jitter.tail:g})",
            where=where,
            hint="give a Pareto index with a finite mean",
        )
    sizes = {"learner": cluster.learners, "machine": len(set(cluster.machine_names()))}
    for section, rows in (("straggler", cluster.straggler), ("failures", cluster.failures)):
        for row in rows:
            if (row.learner < 0) == (row.machine < 0):
                raise UsageError(f"[[{section}]] must set either learner or machine", where=where, hint="set one of them")
            kind = "learner" if row.learner >= 0 else "machine"
            number = max(row.learner, row.machine)
            if number >= sizes[kind]:
                raise UsageError(
                    f"[[{section}]] {kind} must be < {sizes[kind]} (got {number})",
                    where=where,
                    hint=f"give 0 to {sizes[kind] - 1}",
                )
    for straggler in cluster.straggler:
        if straggler.to_s <= straggler.from_s:
            raise UsageError(
                f"[[straggler]] to_s must be > from_s (got {straggler.to_s:g} and {straggler.from_s:g})",
                where=where,
                hint="give an interval of positive length",
            )
