"""The worker: the interface that strategies are written against. One flat vector, one gradient, a few operations.

`w` holds the weights that this rank trains and shares. Updates, assignments and background exchanges act on the whole
vector, under its lock. phi is the module's parameters. `grad()` first copies w to phi, so forward and backward see one
version while other ranks average into w. Without background exchanges, w and phi are the same vector.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from roundelay.core.buckets import Buckets
from roundelay.core.contracts import Communicator, GossipHandle, NodeGroup, SharedWeights, Work
from roundelay.core.deferred import Gradient, Update, UpdatedVector, Vector, materialize
from roundelay.core.flat import Flat
from roundelay.core.update_log import Op, UpdateLog
from roundelay.strategies.step import ActivityTimer, CompletedWork, LocalOptimizer, StepInfo, StepTimer, TopologyResolver


class Worker:
    """`me`: the rank, vector and operations of one learner.

    Only the thread that trains may call it. Collective operations say so: all ranks must call them, in the same order.
    """

    def __init__(
        self,
        comm: Communicator,
        flat: Flat,
        optimizer: LocalOptimizer,
        topologies: TopologyResolver,
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
        self._weight_gradients, self._steps_per_exchange = weight_gradients, steps_per_exchange
        self._compute: Callable[[], float] | None = None
        self._staleness = self._exchanges = self._gap = 0
        self.shared_weights: SharedWeights | None = comm.publish(flat.phi) if shares_weights else None
        self._read_version = self._phi_version = self.shared_weights.version if self.shared_weights else 0
        self._peer_version: dict[int, int] = {}
        self._update_log: UpdateLog | None = None
        self._g: Tensor | None = None
        self._buckets: Buckets | None = None

    # -- rank and vector -------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Return the rank of this worker; in a hierarchy, of its node among the nodes."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """Return the number of workers; in a hierarchy, of nodes."""
        return self.comm.size

    @property
    def now(self) -> float:
        """Return the time in seconds, from an arbitrary origin."""
        return self.clock()

    @property
    def w(self) -> Tensor:
        """Return the shared vector itself, not a copy. Read it only; write it with `add_` and `assign_`."""
        return self.flat.phi if self.shared_weights is None else self.shared_weights.vector

    @property
    def samples(self) -> int:
        """Return the number of samples of this step's batch."""
        return self.step_info.node_samples

    @property
    def lr(self) -> float:
        """Return the learning rate of this step."""
        return self.optimizer.lr

    @property
    def is_node_leader(self) -> bool:
        """Return True if this rank holds its node's w and communicates for the node. Always True outside a hierarchy."""
        return self.node is None or self.node.rank == 0

    def begin(self, step_info: StepInfo, compute: Callable[[], float] | None) -> None:
        """Begin a step on these samples. `compute` runs forward and backward at phi and returns the loss."""
        self.step_info, self._compute, self._staleness = step_info, compute, 0

    def end(self) -> None:
        """End a step: count it and notify the gossip thread. Raises RuntimeError if the step took no gradient."""
        if self._compute is not None:
            raise RuntimeError("strategy.step() must call grad() or mean_grad() once (got no call)")
        if self.step_info.node_samples:
            self.step_timer.staleness[self._staleness] += 1
        self.k += 1
        if self.gossip_handle is not None:
            exchanges = self.gossip_handle.exchanges
            self._gap = self._gap + 1 if exchanges == self._exchanges else 0
            self._exchanges = exchanges
            self.step_timer.gaps[self._gap] += 1
            self.gossip_handle.notify_step()

    def close(self) -> None:
        """Remove hooks and move the parameters back to private memory."""
        if self._buckets is not None:
            self._buckets.close()
            self._buckets = None
        if self._node_group is not None and self._node_group.slot is not None and self.is_node_leader:
            self.flat.rebase(torch.empty_like(self.flat.phi))

    def record(self, update_log: UpdateLog) -> None:
        """Log all later reads and writes of shared vectors. Call it before the first step."""
        if self.shared_weights is not None:
            self._update_log = update_log
            self.comm.record(update_log)

    def _log(self, op: Op, number: int) -> None:
        if self._update_log is not None:
            self._update_log.append(op, self.rank, number, self.rank)

    def timer(self, activity: str) -> ActivityTimer:
        """Return a context manager that adds its time to an activity: data, compute, update or comm."""
        return ActivityTimer(self, activity)

    # -- gradient and optimizer ------------------------------------------------------------------------------------

    def read(self) -> None:
        """phi <- w, under the lock that background exchanges take."""
        if self.shared_weights is None:
            return
        with self.shared_weights.locked():
            number, version = self.shared_weights.count()
            self._log(Op.READ, number)
            if version != self._phi_version:
                self.flat.phi.copy_(self.shared_weights.vector)
            self._phi_version = self._read_version = version

    def grad(self) -> Gradient:
        """Return the gradient on this step's batch at phi = w. Call it exactly once per step; blocks for the computation.

        In a hierarchy: the sample-weighted mean over the ranks of the node, all at the leader's w.
        """
        self.samples_since_mean += self.step_info.node_samples
        share = (
            self.step_info.node_samples * self.size / max(self.step_info.global_samples, 1) if self._weight_gradients else 1.0
        )
        with self.timer("compute"):
            self.read()
        if self._node_group is None:
            with self.timer("compute"):
                self._run()
            return Gradient(self._gather, self.step_info.node_samples, share, in_parameters=True)
        g = self._node_gradient(self._node_group)
        return Gradient(lambda: g, self.step_info.node_samples, share)

    def run_follower_step(self) -> None:
        """Run the step of a rank that is not a leader: compute a gradient at the leader's w and reduce it to the leader."""
        assert self._node_group is not None
        self._node_gradient(self._node_group)

    def mean_grad(self) -> Gradient:
        """Return the sample-weighted mean of all ranks' gradients. Collective, in place of `grad()`; blocks.

        Buckets of the gradient are reduced while backward is still running.
        """
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
        """Run forward and backward, which leave the gradient in the parameters."""
        compute, self._compute = self._compute, None
        if compute is None:
            raise RuntimeError("strategy.step() must call grad() or mean_grad() once (got a second call)")
        self.flat.clear_gradients()
        if self.step_info.local_samples:
            self.loss = compute()

    def _gather(self) -> Tensor:
        if self._g is None:
            self._g = torch.empty_like(self.flat.phi)
        return self.flat.gather(self._g)

    def _node_gradient(self, node_group: NodeGroup) -> Tensor:
        """Return the sample-weighted mean over the ranks of the node, at the leader's w. It is valid on the leader only."""
        assert self.node is not None
        with self.timer("comm"):
            node_group.broadcast(self.flat.phi)
        return self._reduced_gradient(
            self.node, node_group.reduce, self.step_info.local_samples / max(self.step_info.node_samples, 1)
        )

    def _reduced_gradient(self, comm: Communicator, reduce: Callable[[Tensor], Work], weight: float) -> Tensor:
        """Return the sum of weight * gradient over the ranks of `comm`."""
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
            self._buckets = Buckets(self.flat, reduce)
        with self.timer("compute"), self._buckets.reducing(self._g, weight):
            self._run()
        with self.timer("comm"):
            return self._buckets.wait()

    def delta(self, g: Vector) -> Update:
        """Return D(g), the update that the local optimizer would subtract. It is computed when it is first used."""
        d = self.optimizer.delta(g)
        return d if not isinstance(g, Gradient) or g.share == 1.0 else d.scaled(g.share)

    @property
    def state(self) -> Tensor:
        """Return a copy of the local optimizer's floating-point state as one vector, possibly empty."""
        return self.optimizer.state_vector()

    def load_state(self, state: Tensor) -> None:
        """Load a vector like `state` into the local optimizer."""
        self.optimizer.load_state_vector(state)

    def reset_state(self) -> None:
        """Clear the local optimizer's state."""
        self.optimizer.reset_state()

    # -- writing w -------------------------------------------------------------------------------------------------

    def add_(self, d: Vector) -> None:
        """w <- w + d, under the lock that background exchanges take."""
        shared_weights = self.shared_weights
        if shared_weights is None:
            if isinstance(d, Update):
                d.add_to(self.flat.phi, self.flat.phi, True)
            else:
                self.flat.phi.add_(materialize(d))
            return
        with self.timer("update"), shared_weights.locked():
            number, version = shared_weights.count(writes=1)
            self._log(Op.UPDATE, number)
            stale = version - 1 - self._read_version
            if isinstance(d, Update) and self._on_cpu:
                d.add_to(shared_weights.vector, self.flat.phi, stale == 0)
                self._phi_version = version
            elif isinstance(d, Update):  # GPU (untested): w is in host memory, and the next read() copies it to phi
                shared_weights.vector.add_(d.tensor().to(shared_weights.vector.device))
            else:
                shared_weights.vector.add_(materialize(d))
        self._staleness = stale

    def assign_(self, x: Vector) -> None:
        """w <- x, under the lock that background exchanges take."""
        shared_weights = self.shared_weights
        if shared_weights is None and isinstance(x, UpdatedVector):
            x.assign_to(self.flat.phi)
            return
        if shared_weights is None:
            self.flat.phi.copy_(materialize(x))
            return
        with self.timer("update"), shared_weights.locked():
            number, _ = shared_weights.count(writes=1)
            self._log(Op.ASSIGN, number)
            shared_weights.vector.copy_(materialize(x))

    def last(self) -> Tensor:
        """Return a copy of w for the final average, taken under the lock."""
        if self.shared_weights is None:
            return self.w.clone()
        with self.shared_weights.locked():
            number, _ = self.shared_weights.count()
            self._log(Op.FINAL_READ, number)
            return self.shared_weights.vector.clone()

    # -- collectives -----------------------------------------------------------------------------------------------

    def start_mean(self, x: Vector, weight: float | None = None) -> Work:
        """Start the (weighted) mean of all ranks' x and return at once. Collective. Do not write x before `wait`."""
        if self.size == 1:
            return CompletedWork(materialize(x).clone())
        return self.comm.all_reduce_mean(materialize(x), weight, self.deterministic_reduce)

    def mean(self, x: Vector, weight: float | None = None) -> Tensor:
        """Return the (weighted) mean of all ranks' x. Collective; blocks until all ranks have called it."""
        with self.timer("comm"):
            return self.start_mean(x, weight).wait()

    def wait(self, work: Work) -> Tensor:
        """Block until `work` is done and return its result. The time counts as communication."""
        with self.timer("comm"):
            return work.wait()

    def start_neighbor_average(self, x: Vector, topology: str) -> Work:
        """Start sum_j T_ij x_j over this rank's neighbors and return at once. Collective. Do not write x before `wait`."""
        row = self.topologies.row(topology, self.rank, self.size)
        if set(row) == {self.rank}:
            return CompletedWork(materialize(x).clone())
        return self.comm.neighbor_average(materialize(x), row)

    # -- in the background -----------------------------------------------------------------------------------------

    def gossip(self, topology: str) -> None:
        """Start averaging w with one partner per round, in a background thread. Collective; call it in `start`.

        It needs `traits.shares_weights`. Exchanges hold the lock of w only while they copy or average it.
        """
        if self.size == 1:
            return
        if self.shared_weights is None:
            raise RuntimeError("traits.shares_weights must be True for a strategy that calls gossip() (got False)")
        matching = self.topologies.matching(topology, self.size)
        self.gossip_handle = self.comm.gossip(self.shared_weights, matching, self._steps_per_exchange)

    def remote_add(self, peer: int, d: Vector) -> None:
        """w of `peer` <- w of `peer` + d. One-sided: blocks, but the peer's training thread takes no part.

        Records the staleness of the update: the writes to the peer's w since the last `remote_get`.
        """
        if peer == self.rank:
            self.add_(d)
            return
        with self.timer("comm"):
            before = self.comm.remote_add(peer, materialize(d))
        self._staleness = before - self._peer_version.get(peer, before)

    def remote_get(self, peer: int) -> Tensor:
        """Return a copy of the w of `peer`. One-sided: blocks, but the peer's training thread takes no part."""
        out = torch.empty_like(self.w)
        with self.timer("comm"):
            self._peer_version[peer] = self.comm.remote_get(peer, out)
        return out
