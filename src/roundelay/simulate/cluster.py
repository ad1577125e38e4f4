"""Describe a cluster: what its machines, learners and links can do. Read from a TOML file or from a preset.

Units are part of the names: s seconds, us microseconds, gbit gigabits (10^9 bits), gb gigabytes (10^9 bytes). A value that
is left out costs no time and has no limit.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from roundelay.errors import UsageError, did_you_mean

FOREVER = math.inf
PRESET_FOLDER = Path(__file__).with_name("clusters")


@dataclass(frozen=True)
class MachineGroup:
    """`count` equal machines."""

    count: int = 1
    learners: int = 1  # learners on each machine
    memory_gb: float = FOREVER  # host memory of each machine, shared by its learners
    speed: float = 1.0  # 0.5: learners on these machines compute half as fast as [learner] says


@dataclass(frozen=True)
class SpeedModel:
    """Variation of a learner's compute time from step to step. The mean stays the same."""

    kind: str = "constant"  # constant; gaussian: log-normal factors; heavy_tail: Pareto factors, rare very long steps
    spread: float = 0.05  # gaussian: standard deviation of the logarithm; heavy_tail: mean excess over the usual time
    tail: float = 2.5  # heavy_tail: Pareto index, must be > 1; smaller values give longer worst steps


@dataclass(frozen=True)
class ComputeModel:
    """Compute time and memory of one learner."""

    seconds_per_sample: float = 0.0  # forward and backward pass
    seconds_per_step: float = 0.0  # cost of a step that does not depend on the batch: kernel launches, the optimizer
    backward_share: float = 0.667  # share of the compute time in the backward pass, during which gradients are sent
    memory_gb: float = FOREVER  # memory of the learner's device
    jitter: SpeedModel = SpeedModel()


@dataclass(frozen=True)
class LinkModel:
    """One kind of link."""

    gbit_per_s: float = FOREVER
    latency_us: float = 0.0
    duplex: str = "full"  # full: both directions at once; half: one direction at a time
    cpu_s_per_gb: float = 0.0  # seconds of its core that a learner loses per GB exchanged while it computes
    shared: bool = True  # true: the learners of a machine share one link; false: each learner has its own


@dataclass(frozen=True)
class LinkModels:
    """The links inside a machine and between machines."""

    inside: LinkModel = LinkModel(shared=False)
    between: LinkModel = LinkModel()


@dataclass(frozen=True)
class MemoryModel:
    """Host memory of a machine, which holds the shared weights."""

    gb_per_s: float = FOREVER  # of all learners and gossip threads of a machine together
    device_gb_per_s: float = FOREVER  # between device and host memory; shared weights are copied twice per step
    exchange_gb_per_s: float = FOREVER  # one pair average in place, inside a machine; counts the bytes of both vectors
    contention: float = 0.0  # share of an exchange's time that its learners lose; 1 if gossip runs on the learners' cores


@dataclass(frozen=True)
class LoaderModel:
    """The source of batches."""

    samples_per_s: float = FOREVER  # per learner, in the background, one batch ahead


@dataclass(frozen=True)
class StragglerModel:
    """A learner or a machine whose steps take `factor` times as long during an interval."""

    factor: float
    learner: int = -1
    machine: int = -1
    from_s: float = 0.0
    to_s: float = FOREVER


@dataclass(frozen=True)
class Failure:
    """A learner or a machine that fails at a time."""

    at_s: float
    learner: int = -1
    machine: int = -1


@dataclass(frozen=True)
class Cluster:
    """Machines, learners, links, stragglers and failures."""

    name: str = "cluster"
    about: str = ""
    machines: tuple[MachineGroup, ...] = (MachineGroup(),)
    learner: ComputeModel = ComputeModel()
    link: LinkModels = LinkModels()
    memory: MemoryModel = MemoryModel()
    loader: LoaderModel = LoaderModel()
    straggler: tuple[StragglerModel, ...] = ()
    failures: tuple[Failure, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)  # key -> where its value comes from and how certain it is

    @property
    def learners(self) -> int:
        return sum(m.count * m.learners for m in self.machines)

    def machine_names(self) -> list[str]:
        """Return the machine of every learner, by rank."""
        names: list[str] = []
        number = 0
        for group in self.machines:
            for _ in range(group.count):
                names += [f"machine-{number}"] * group.learners
                number += 1
        return names

    def speeds(self) -> list[float]:
        """Return the speed of every learner relative to [learner], by rank."""
        return [group.speed for group in self.machines for _ in range(group.count * group.learners)]

    def first(self, learners: int) -> Cluster:
        """Return the cluster reduced to its first `learners` learners.

        Raises:
            UsageError: the cluster has fewer learners, or `learners` < 1.
        """
        if learners < 1 or learners > self.learners:
            raise UsageError(
                f"learners must be between 1 and {self.learners} on this cluster (got {learners})",
                where=f"learners, cluster '{self.name}'",
                hint="choose fewer learners, or describe a larger cluster",
            )
        groups: list[MachineGroup] = []
        for group in self.machines:
            whole = min(group.count, learners // group.learners) if group.learners else 0
            if whole:
                groups.append(replace(group, count=whole))
                learners -= whole * group.learners
            if learners and whole < group.count:
                groups.append(replace(group, count=1, learners=learners))
                learners = 0
            if not learners:
                break
        part = replace(self, machines=tuple(groups))
        size, machines = part.learners, len(set(part.machine_names()))
        return replace(
            part,
            straggler=tuple(s for s in self.straggler if s.learner < size and s.machine < machines),
            failures=tuple(f for f in self.failures if f.learner < size and f.machine < machines),
        )


# -- reading ---------------------------------------------------------------------------------------------------------------


def load(source: str | Path) -> Cluster:
    """A cluster from a file, or a preset by name."""
    text = str(source)
    if text in presets():
        return read(PRESET_FOLDER / f"{text}.toml")
    if not text.endswith(".toml") and not Path(text).exists():
        raise UsageError(
            f"there is no cluster '{text}'",
            where="CLUSTER",
            hint=f"{did_you_mean(text, presets())} or give the path of a .toml file (roundelay list clusters)",
        )
    return read(Path(text))


def presets() -> list[str]:
    """Names of the clusters that come with the package."""
    return sorted(path.stem for path in PRESET_FOLDER.glob("*.toml"))


def read(path: Path) -> Cluster:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise UsageError(f"cannot read {path}: {why}", where="CLUSTER", hint="give the path of a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not valid TOML: {error}", where=str(path), hint="see docs/simulate.md") from error
    return from_tree({"name": path.stem, **tree}, str(path))


def from_tree(tree: Mapping[str, Any], where: str = "cluster") -> Cluster:
    """A cluster from plain values, checked."""
    made: Cluster = _build(Cluster, tree, where, "")
    check(made, where)
    return made


def _build(cls: type[Any], tree: Any, where: str, at: str) -> Any:
    if not isinstance(tree, Mapping):
        raise UsageError(f"'{at}' is {tree!r}, not a table", where=where, hint=f"write [{at}] and its keys below")
    hints = get_type_hints(cls)
    known = {f.name: f for f in fields(cls)}
    values: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{at}.{key}" if at else key
        if key not in known:
            raise UsageError(f"there is no key '{name}' in a cluster", where=where, hint=did_you_mean(key, known))
        values[key] = _value(hints[key], value, where, name)
    missing = [f.name for f in known.values() if f.name not in values and f.default is MISSING and f.default_factory is MISSING]
    if missing:
        raise UsageError(f"'{at}' lacks '{missing[0]}'", where=where, hint=f"add {missing[0]} = …")
    return cls(**values)


def _value(kind: Any, value: Any, where: str, name: str) -> Any:
    if is_dataclass(kind):
        return _build(kind, value, where, name)  # type: ignore[arg-type]
    inner = get_args(kind)
    if inner and is_dataclass(inner[0]):
        if not isinstance(value, list):
            raise UsageError(f"'{name}' is not a list of tables", where=where, hint=f"write [[{name}]] and its keys below")
        return tuple(_build(inner[0], row, where, name) for row in value)  # type: ignore[arg-type]
    if inner:
        return dict(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise UsageError(f"{name} = {value!r} is not of type {kind.__name__}", where=where, hint=f"give a {kind.__name__}")
    return value


# -- checking --------------------------------------------------------------------------------------------------------------


def check(cluster: Cluster, where: str = "cluster") -> None:
    """Refuses what cannot be."""

    def refuse(what: str, do: str) -> None:
        raise UsageError(what, where=f"{where}, cluster '{cluster.name}'", hint=do)

    if not cluster.machines:
        refuse("a cluster without machines", "add [[machines]] with count and learners")
    for m in cluster.machines:
        if m.count < 1 or m.learners < 1:
            refuse(f"machines: count = {m.count}, learners = {m.learners}", "give at least 1 of each")
    inside, between, memory, learner = cluster.link.inside, cluster.link.between, cluster.memory, cluster.learner
    above = [
        ("link.inside.gbit_per_s", inside.gbit_per_s),
        ("link.between.gbit_per_s", between.gbit_per_s),
        ("memory.gb_per_s", memory.gb_per_s),
        ("memory.device_gb_per_s", memory.device_gb_per_s),
        ("memory.exchange_gb_per_s", memory.exchange_gb_per_s),
        ("loader.samples_per_s", cluster.loader.samples_per_s),
        ("learner.memory_gb", learner.memory_gb),
        *(("machines.memory_gb", m.memory_gb) for m in cluster.machines),
        *(("machines.speed", m.speed) for m in cluster.machines),
    ]
    for name, value in above:
        if not value > 0:
            refuse(f"{name} = {value:g}: nothing would ever arrive", "give a number above 0, or leave it out for no limit")
    not_below = [
        ("learner.seconds_per_sample", learner.seconds_per_sample),
        ("learner.seconds_per_step", learner.seconds_per_step),
        ("learner.jitter.spread", learner.jitter.spread),
        ("link.inside.latency_us", inside.latency_us),
        ("link.between.latency_us", between.latency_us),
        ("link.inside.cpu_s_per_gb", inside.cpu_s_per_gb),
        ("link.between.cpu_s_per_gb", between.cpu_s_per_gb),
        ("memory.contention", memory.contention),
        *(("failures.at_s", f.at_s) for f in cluster.failures),
        *(("straggler.from_s", s.from_s) for s in cluster.straggler),
    ]
    for name, value in not_below:
        if not value >= 0 or math.isinf(value):
            refuse(f"{name} = {value:g}: time does not run backwards", "give a finite number of at least 0")
    if not 0 <= cluster.learner.backward_share <= 1:
        refuse(f"learner.backward_share = {cluster.learner.backward_share:g}", "give a share between 0 and 1")
    _choose(cluster.learner.jitter.kind, ("constant", "gaussian", "heavy_tail"), "learner.jitter.kind", where)
    for link in (cluster.link.inside, cluster.link.between):
        _choose(link.duplex, ("full", "half"), "link.duplex", where)
    if cluster.learner.jitter.kind == "heavy_tail" and cluster.learner.jitter.tail <= 1:
        refuse(f"learner.jitter.tail = {cluster.learner.jitter.tail:g} has no mean", "give a Pareto index above 1")
    size, machines = cluster.learners, len(set(cluster.machine_names()))
    for what, rows in (("straggler", cluster.straggler), ("failures", cluster.failures)):
        for row in rows:
            if (row.learner < 0) == (row.machine < 0):
                refuse(
                    f"[[{what}]] names {'no' if row.learner < 0 else 'both a'} learner or machine",
                    "give one: learner or machine",
                )
            if row.learner >= size or row.machine >= machines:
                refuse(
                    f"[[{what}]] speaks of {'learner' if row.learner >= 0 else 'machine'} {max(row.learner, row.machine)}",
                    f"there are learners 0 to {size - 1} and machines 0 to {machines - 1}",
                )
    for s in cluster.straggler:
        if s.factor <= 0 or s.to_s <= s.from_s:
            refuse(
                f"[[straggler]] with factor {s.factor:g} from {s.from_s:g} to {s.to_s:g} s",
                "give a factor above 0, to_s after from_s",
            )


def _choose(value: str, known: tuple[str, ...], name: str, where: str) -> None:
    if value not in known:
        raise UsageError(f"{name} = '{value}'", where=where, hint=did_you_mean(value, known))
