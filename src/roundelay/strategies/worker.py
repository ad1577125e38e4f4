"""The worker: what a strategy is written against. One flat vector, one gradient, a few verbs.

`w` is shared_weights: moves, placements and exchanges act on it, whole vector at a time, under its lock. phi is the module's
parameters; `grad()` refreshes phi from w first, so forward and backward see one version while neighbours go on averaging
into w. For strategies without background traffic the two are one vector.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from roundelay.core.buckets import Buckets
from roundelay.core.contracts import Communicator, GossipHandle, Matching, NodeGroup, SharedWeights, Work
from roundelay.core.deferred import Gradient, Update, UpdatedVector, Vector, materialize
from roundelay.core.flat import Flat
from roundelay.core.update_log import Op, UpdateLog


class LocalOptimizer(Protocol):
    """D: any torch optimizer, as a function from gradient to displacement."""

    def delta(self, g: Vector) -> Update: ...

    def state_vector(self) -> Tensor: ...

    def load_state_vector(self, state: Tensor) -> None: ...

    def reset_state(self) -> None: ...

    @property
    def lr(self) -> float: ...


class Topologies(Protocol):
    """Resolves the topology a strategy names by string."""

    def matching(self, name: str, size: int) -> Matching: ...

    def row(self, name: str, rank: int, size: int) -> dict[int, float]: ...


@dataclass
class StepInfo:
    """The part of the data this step works on, and its weight beside the others'."""

    local_samples: int
    """Samples in this learner's batch; 0 where it has none and only joins in."""
    node_samples: int
    """Samples of this worker: its own, or those of its whole machine in a hierarchy."""
    global_samples: int
    """Samples of everybody in this round (turn), or `size` times the usual batch (race)."""
    position: int = 0
    """Global samples before this step: drives the rate."""
    total: int = 0
    """Global samples of the whole run."""
    start_of_run: int = 0
    """Global samples when this run began; not 0 after a resume."""


@dataclass
class StepTimer:
    """Where the time of a worker went since the metrics were last taken."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    staleness: Counter[int] = field(default_factory=Counter)


class _Ready:
    """Something that is already there."""

    done = True

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def wait(self) -> Tensor:
        return self._x


class _Timer:
    """A stretch of a worker's time, booked when it is over. A class, since it is entered several times per step."""

    __slots__ = ("_began", "_outer", "_what", "_worker")

    def __init__(self, worker: Worker, what: str) -> None:
        self._worker, self._what = worker, what

    def __enter__(self) -> None:
        worker = self._worker
        self._outer, worker.phase = worker.phase, self._what
        self._began = worker.phase_since = worker.clock()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        worker = self._worker
        worker.step_timer.seconds[self._what] += worker.clock() - self._began
        worker.phase = self._outer


class Worker:
    """`me`: one learner's place, vector and verbs."""

    def __init__(
        self,
        comm: Communicator,
        flat: Flat,
        optimizer: LocalOptimizer,
        topologies: Topologies,
        clock: Callable[[], float],
        *,
        shares_weights: bool,
        deterministic_reduce: bool = False,
        weight_gradients: bool = True,
        steps_per_exchange: float = 1.0,
        node: Communicator | None = None,
    ) -> None:
        self.comm, self.flat, self.optimizer, self.topologies, self.clock = comm, flat, optimizer, topologies, clock
        self.deterministic_reduce = deterministic_reduce
        self._on_cpu = flat.device.type == "cpu"
        self.node = node if node is not None and node.size > 1 else None
        self._node_group = self.node.node_group(flat.phi) if self.node is not None else None
        if self._node_group is not None and self._node_group.slot is not None and self.is_node_leader:
            flat.rebase(self._node_group.slot)
        self.k = 0
        self.step_info = StepInfo(0, 0, 0)
        self.step_timer = StepTimer()
        self.gossip_handle: GossipHandle | None = None
        self.loss = float("nan")
        self.samples_since_mean = 0
        self.phase, self.phase_since = "starting", clock()
        self._weighs_steps, self._gradients_per_meeting = weight_gradients, steps_per_exchange
        self._compute: Callable[[], float] | None = None
        self._staleness = 0
        self.shared_weights: SharedWeights | None = comm.publish(flat.phi) if shares_weights else None
        self._read_version = self._phi_version = self.shared_weights.version if self.shared_weights else 0
        self._peer_version: dict[int, int] = {}
        self._update_log: UpdateLog | None = None
        self._g: Tensor | None = None
        self._buckets: Buckets | None = None

    # -- place and vector ------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    @property
    def now(self) -> float:
        return self.clock()

    @property
    def w(self) -> Tensor:
        """The published vector: read it, never write it; write with move and place."""
        return self.flat.phi if self.shared_weights is None else self.shared_weights.vector

    @property
    def samples(self) -> int:
        """Samples of this step's batch."""
        return self.step_info.node_samples

    @property
    def lr(self) -> float:
        """The learning rate of this step."""
        return self.optimizer.lr

    @property
    def is_node_leader(self) -> bool:
        """Whether this worker speaks for its machine (always, outside a hierarchy)."""
        return self.node is None or self.node.rank == 0

    def begin(self, step_info: StepInfo, compute: Callable[[], float] | None) -> None:
        """The next step works on this share; `compute` runs forward and backward at phi and returns the loss."""
        self.step_info, self._compute, self._staleness = step_info, compute, 0

    def end(self) -> None:
        """After the strategy's step."""
        if self._compute is not None:
            raise RuntimeError("the strategy's step did not call grad() or mean_grad(): every step takes one gradient")
        if self.step_info.node_samples:
            self.step_timer.staleness[self._staleness] += 1
        self.k += 1
        if self.gossip_handle is not None:
            self.gossip_handle.notify_step()

    def _applied(self, staleness: int) -> None:
        """This step's gradient went into a vector that had been written that often since it was read."""
        self._staleness = staleness

    def close(self) -> None:
        """Gives the module back as it was found."""
        if self._buckets is not None:
            self._buckets.close()
            self._buckets = None
        if self._node_group is not None and self._node_group.slot is not None and self.is_node_leader:
            self.flat.rebase(torch.empty_like(self.flat.phi))

    def record(self, update_log: UpdateLog) -> None:
        """From now on what happens to published vectors is noted down."""
        if self.shared_weights is not None:
            self._update_log = update_log
            self.comm.record(update_log)

    def _note(self, kind: Op, number: int) -> None:
        if self._update_log is not None:
            self._update_log.append(kind, self.rank, number, self.rank)

    def timer(self, what: str) -> _Timer:
        """Books the time of a block under data, compute or comm."""
        return _Timer(self, what)

    # -- gradient and optimizer ------------------------------------------------------------------------------------

    def read(self) -> None:
        """phi <- w, one whole version of it."""
        if self.shared_weights is None:
            return
        with self.shared_weights.locked():
            number, version = self.shared_weights.count()
            self._note(Op.READ, number)
            if version != self._phi_version:
                self.flat.phi.copy_(self.shared_weights.vector)
            self._phi_version = self._read_version = version

    def grad(self) -> Gradient:
        """The gradient on this step's batch at phi = w as it is now. Exactly once per step.
        In a hierarchy: the sample-weighted mean over the machine's members, all at the first one's w."""
        self.samples_since_mean += self.step_info.node_samples
        share = self.step_info.node_samples * self.size / max(self.step_info.global_samples, 1) if self._weighs_steps else 1.0
        with self.timer("compute"):
            self.read()
        if self._node_group is None:
            with self.timer("compute"):
                self._run()
            return Gradient(self._gather, self.step_info.node_samples, share, in_parameters=True)
        g = self._machine_gradient(self._node_group)
        return Gradient(lambda: g, self.step_info.node_samples, share)

    def run_follower_step(self) -> None:
        """One step of a machine's other members: a gradient at the first one's w, handed to it."""
        assert self._node_group is not None
        self._machine_gradient(self._node_group)

    def mean_grad(self) -> Gradient:
        """The sample-weighted mean of everybody's gradient; buckets of it travel while backward goes on."""
        if self.size == 1 or self.deterministic_reduce or self.node is not None:
            g = self.grad()
            if self.size == 1:
                g.share = 1.0
                return g
            mean = self.mean(g, weight=float(g.samples))
        else:
            self.read()
            weight = self.step_info.local_samples / max(self.step_info.global_samples, 1)
            mean = self._reduced_gradient(self.comm, self.comm.all_reduce_, weight)
        return Gradient(lambda: mean, self.step_info.global_samples, 1.0)

    def _run(self) -> None:
        compute, self._compute = self._compute, None
        if compute is None:
            raise RuntimeError("a second gradient in one step: every step takes exactly one")
        self.flat.clear_gradients()
        if self.step_info.local_samples:
            self.loss = compute()

    def _gather(self) -> Tensor:
        if self._g is None:
            self._g = torch.empty_like(self.flat.phi)
        return self.flat.gather(self._g)

    def _machine_gradient(self, node_group: NodeGroup) -> Tensor:
        """The sample-weighted mean over the machine's members at the first one's w; only the first has it."""
        assert self.node is not None
        with self.timer("comm"):
            node_group.broadcast(self.flat.phi)
        return self._reduced_gradient(
            self.node, node_group.reduce, self.step_info.local_samples / max(self.step_info.node_samples, 1)
        )

    def _reduced_gradient(self, comm: Communicator, add_up: Callable[[Tensor], Work], weight: float) -> Tensor:
        """sum over the members of comm of weight * gradient."""
        if self._g is None and self._node_group is not None and not self.is_node_leader:
            self._g = self._node_group.slot
        if self._g is None:
            self._g = torch.empty_like(self.flat.phi)
        if self.deterministic_reduce:
            with self.timer("compute"):
                self._run()
            with self.timer("comm"):
                return comm.all_reduce_mean(self._gather().mul_(weight), None, True).wait().mul_(comm.size)
        if self._buckets is None:
            self._buckets = Buckets(self.flat, add_up)
        with self.timer("compute"), self._buckets.reducing(self._g, weight):
            self._run()
        with self.timer("comm"):
            return self._buckets.wait()

    def delta(self, g: Vector) -> Update:
        """D(g): what the local optimizer would subtract."""
        d = self.optimizer.delta(g)
        return d if not isinstance(g, Gradient) or g.share == 1.0 else d.scaled(g.share)

    @property
    def state(self) -> Tensor:
        """The local optimizer's tensors as one vector (a copy; may be empty)."""
        return self.optimizer.state_vector()

    def load_state(self, state: Tensor) -> None:
        self.optimizer.load_state_vector(state)

    def reset_state(self) -> None:
        """Resets the local optimizer's state."""
        self.optimizer.reset_state()

    # -- writing w -------------------------------------------------------------------------------------------------

    def add_(self, d: Vector) -> None:
        """w <- w + d, atomic towards the background."""
        shared_weights = self.shared_weights
        if shared_weights is None:
            if isinstance(d, Update):
                d.add_to(self.flat.phi, self.flat.phi, True)
            else:
                self.flat.phi.add_(materialize(d))
            return
        with self.timer("update"), shared_weights.locked():
            number, version = shared_weights.count(writes=1)
            self._note(Op.UPDATE, number)
            stale = version - 1 - self._read_version
            if isinstance(d, Update) and self._on_cpu:
                d.add_to(shared_weights.vector, self.flat.phi, stale == 0)
                self._phi_version = version
            elif isinstance(d, Update):  # GPU: untested here; w lives in host memory, phi is read anew
                shared_weights.vector.add_(d.tensor().to(shared_weights.vector.device))
            else:
                shared_weights.vector.add_(materialize(d))
        self._applied(stale)

    def assign_(self, x: Vector) -> None:
        """w <- x, atomic towards the background."""
        shared_weights = self.shared_weights
        if shared_weights is None and isinstance(x, UpdatedVector):
            x.assign_to(self.flat.phi)
            return
        if shared_weights is None:
            self.flat.phi.copy_(materialize(x))
            return
        with self.timer("update"), shared_weights.locked():
            number, _ = shared_weights.count(writes=1)
            self._note(Op.ASSIGN, number)
            shared_weights.vector.copy_(materialize(x))

    def last(self) -> Tensor:
        """A copy of w for the closing average, one whole version of it."""
        if self.shared_weights is None:
            return self.w.clone()
        with self.shared_weights.locked():
            number, _ = self.shared_weights.count()
            self._note(Op.FINAL_READ, number)
            return self.shared_weights.vector.clone()

    # -- rendezvous ------------------------------------------------------------------------------------------------

    def start_mean(self, x: Vector, weight: float | None = None) -> Work:
        """The mean of everybody's x is under way; x must stay as it is until waited for."""
        if self.size == 1:
            return _Ready(materialize(x).clone())
        return self.comm.all_reduce_mean(materialize(x), weight, self.deterministic_reduce)

    def mean(self, x: Vector, weight: float | None = None) -> Tensor:
        """The (weighted) mean of everybody's x; everybody calls it."""
        with self.timer("comm"):
            return self.start_mean(x, weight).wait()

    def wait(self, pending: Work) -> Tensor:
        """Waits for something under way, and books the time as communication."""
        with self.timer("comm"):
            return pending.wait()

    def start_neighbor_average(self, x: Vector, topology: str) -> Work:
        """sum_j T_ij x_j over this worker's neighbours is under way; x must stay as it is until waited for."""
        row = self.topologies.row(topology, self.rank, self.size)
        if set(row) == {self.rank}:
            return _Ready(materialize(x).clone())
        return self.comm.neighbor_average(materialize(x), row)

    # -- in the background -----------------------------------------------------------------------------------------

    def gossip(self, topology: str) -> None:
        """From now on the agents average pairs in the background, round after round."""
        if self.size == 1:
            return
        assert self.shared_weights is not None, "a strategy that gossips declares traits.shares_weights"
        matching = self.topologies.matching(topology, self.size)
        self.gossip_handle = self.comm.gossip(self.shared_weights, matching, self._gradients_per_meeting)

    def remote_add(self, peer: int, d: Vector) -> None:
        """w of the peer <- its w + d, one-sided; the staleness of the gradient behind d is measured there."""
        if peer == self.rank:
            self.add_(d)
            return
        with self.timer("comm"):
            before = self.comm.remote_add(peer, materialize(d))
        self._applied(before - self._peer_version.get(peer, before))

    def remote_get(self, peer: int) -> Tensor:
        """A copy of the peer's w, one-sided."""
        out = torch.empty_like(self.w)
        with self.timer("comm"):
            self._peer_version[peer] = self.comm.remote_get(peer, out)
        return out
