"""`roundelay.Session`: distributed training inside a user's own loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from roundelay.api.connect import connect
from roundelay.data.epoch_order import epoch_order
from roundelay.engine.config import EngineConfig
from roundelay.engine.learner import Learner
from roundelay.engine.sharding import BatchLease, DynamicSharding
from roundelay.errors import DataError, PeerLost, UsageError
from roundelay.fleet.leases import LeaseTable
from roundelay.launch.context import DistributedContext
from roundelay.metrics.events import EventLog
from roundelay.strategies.base import Strategy
from roundelay.strategies.step import StepInfo


class Session:
    """One rank of a distributed job, for a user's own training loop.

    with roundelay.Session(module, optimizer, strategy="adpsgd") as session:
        for batch in session.loader(dataset, batch_size=64, epochs=5):
            session.step(partial(loss_of, batch), samples=len(batch))

    Under torchrun, mpirun or srun every process creates a session; without a launcher the process trains alone. All ranks
    start from rank 0's weights. At the end of the block the module holds the average of all live ranks' models. Creating,
    entering and leaving a session are collective calls, and a session belongs to one thread. A process may open several
    sessions, one after another; all ranks must open them in the same order.

    Args:
        module: The model. Its parameters become views of one flat vector.
        optimizer: A torch optimizer of the module's parameters.
        strategy: Name of a strategy, such as "kstep" or "hierarchical(adpsgd)", or an instance.
        run: Directory for events.jsonl; None writes no events.
        context: Context of this rank; by default it is read from the environment of the launcher.
        settings: Settings of the engine: topology, backend, seed, max_grad_norm, schedule, straggler, timeout_s, and so on.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: str | Strategy = "adpsgd",
        *,
        run: str | Path | None = None,
        context: DistributedContext | None = None,
        **settings: Any,
    ) -> None:
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        self.options = EngineConfig(strategy=name, **settings)
        context = context or connect(self.options, str(next(module.parameters()).device))
        instance = None if isinstance(strategy, str) else strategy
        with closing_after_error(context):
            events = None
            if run is not None:
                Path(run).mkdir(parents=True, exist_ok=True)
                events = EventLog(Path(run) / "events.jsonl", context.rank)
            self.learner = Learner(context, module, optimizer, self.options, events, instance)
        self._lease: BatchLease | None = None
        self._uses_own_loader = False

    @property
    def rank(self) -> int:
        return self.learner.rank

    @property
    def size(self) -> int:
        """Number of ranks in the job."""
        return self.learner.size

    @property
    def steps(self) -> int:
        """Steps of this rank so far, including those without samples."""
        return self.learner.steps

    def __enter__(self) -> Session:
        with closing_after_error(self.learner):
            self.learner.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self._give_up_samples()
                self.learner.finish()
        except BaseException as failure:
            error = failure
            raise
        finally:
            self.learner.close(error)

    # -- data ----------------------------------------------------------------------------------------------------------

    def loader(self, dataset: Any, batch_size: int = 64, epochs: float = 1.0) -> Iterator[TensorBatch]:
        """Yield this rank's batches of a dataset, which needs `len` and indexing.

        All ranks together see each sample once per epoch. Call `step` once per batch, also for an empty one. May be called once
        per session.

        With a strategy that survives failures a rank may leave the loop early, with `break` for example: the other ranks train
        the samples that it has leased and not trained. With other strategies all ranks must leave at the same batch.
        """
        if self.learner.sharding is not None:
            raise UsageError(
                "loader() may be called once per session", where="Session.loader", hint="set epochs=… for several passes"
            )
        samples = len(dataset)
        if samples == 0:
            raise DataError("the dataset must not be empty (got 0 samples)", where="Session.loader")
        sharding = self.learner.shard(samples, round(samples * epochs), [batch_size] * self.size)
        orders: dict[int, Any] = {}
        try:
            for lease in sharding:
                if isinstance(sharding, DynamicSharding) and not sharding.begin(lease):
                    continue  # another rank has taken it over
                if lease.epoch not in orders:
                    orders = {lease.epoch: epoch_order(self.options.seed, lease.epoch, samples)}
                self._lease = lease
                yield stack_samples(dataset, orders[lease.epoch][lease.start : lease.stop])
                if self._lease is not None:
                    raise UsageError(
                        "step() must be called once per batch (got no call)", where="Session.loader", hint="call session.step()"
                    )
        finally:
            with suppress(PeerLost):  # the next call of the session raises it
                self._give_up_samples()

    def _give_up_samples(self) -> None:
        """Let the other ranks train the samples that this rank has leased and not trained; lease no more."""
        learner = self.learner
        if isinstance(learner.sharding, DynamicSharding):
            learner.sharding.give_up()
        elif learner.strategy.traits.sharding == "dynamic":  # without a lease: the other ranks wait until this rank is over
            LeaseTable(learner.job.store, self.rank).give_up()

    def join_uneven(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of any loader, once per epoch; the loaders of different ranks may have different lengths.

        With a synchronous strategy, a rank whose loader has ended takes part in the remaining steps with weight 0, like
        torch.distributed's Join. Raises UsageError with a learning-rate schedule, or if the strategy cannot do this.
        """
        learner, traits = self.learner, self.learner.strategy.traits
        if traits.sharding == "dynamic" and (not traits.shares_weights or len(learner.machine) > 1):
            raise UsageError(
                f"{self.options.strategy} cannot join uneven loaders: it shards dynamically and waits for all ranks",
                where="Session.join_uneven",
                hint="use session.loader(dataset), sharding='static', or a strategy without collectives such as adpsgd",
            )
        if learner.has_schedule:
            raise UsageError(
                "a schedule needs the total number of samples, which join_uneven does not know",
                where="Session.join_uneven",
                hint="use session.loader(dataset), or schedule='constant' and a torch.optim.lr_scheduler",
            )
        self._uses_own_loader = True
        yield from loader
        if traits.sharding == "static":
            while self._step_without_samples():
                pass

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Tensor], samples: int) -> float:
        """Run one step of the strategy on a batch of `samples` samples and return the loss.

        `closure` computes the loss of the batch; the session calls backward and updates the weights. Do not call zero_grad,
        backward or optimizer.step yourself.
        """

        def compute() -> float:
            loss = closure()
            loss.backward()
            return float(loss.detach())

        if self._uses_own_loader:
            self.learner.run_step(self._step_info(samples), compute)
            return self.learner.worker.loss
        if self._lease is None:
            raise UsageError(
                "step() needs a batch of this session",
                where="Session.step",
                hint="iterate over session.loader(…) or session.join_uneven(…)",
            )
        lease, self._lease = self._lease, None
        if samples != lease.step_info.local_samples:
            raise UsageError(
                f"samples must be the size of the batch, {lease.step_info.local_samples} (got {samples})",
                where="Session.step",
                hint="pass samples=len(batch)",
            )
        self.learner.run_step(lease.step_info, compute, lease.span)
        return self.learner.worker.loss

    def _step_without_samples(self) -> bool:
        """Take part in one step of the other ranks; return False if no rank has samples any more. Collective."""
        info = self._step_info(0)
        if info.global_samples == 0:
            return False
        self.learner.run_step(info, None)
        return True

    def _step_info(self, samples: int) -> StepInfo:
        """Return the step info of a batch from a user's loader. Collective if the strategy shards statically."""
        learner, size = self.learner, self.size
        if learner.strategy.traits.sharding == "dynamic":
            position = learner.job.store.add("claimed", samples) - samples
            return StepInfo(samples, samples, samples * size, position)
        global_samples = node_samples = samples
        if size > 1:
            counts = torch.zeros(size, dtype=torch.float64)
            counts[self.rank] = samples
            counts = size * learner.job.all_reduce_mean(counts).wait()
            global_samples, node_samples = round(float(counts.sum())), round(float(counts[learner.machine].sum()))
        return StepInfo(samples, node_samples, global_samples, learner.position)


@contextmanager
def closing_after_error(resource: DistributedContext | Learner) -> Iterator[None]:
    """Close a context or a learner if the block raises, so that the other ranks learn why this rank has left."""
    try:
        yield
    except BaseException as error:
        resource.close(error)
        raise


class TensorBatch:
    """Samples stacked field by field. `x` and `y` are the first two fields; len() is the number of samples."""

    def __init__(self, fields: Sequence[Tensor], samples: int) -> None:
        self.fields, self._samples = fields, samples

    @property
    def x(self) -> Tensor:
        return self.fields[0]

    @property
    def y(self) -> Tensor:
        return self.fields[1]

    def __len__(self) -> int:
        return self._samples


def stack_samples(dataset: Any, indices: Any) -> TensorBatch:
    """Stack samples of a dataset into a batch; without indices, into an empty batch with the same fields."""
    chosen = [int(index) for index in indices]
    items = [dataset[index] for index in (chosen or [0])]
    rows = [item if isinstance(item, tuple | list) else (item,) for item in items]
    fields = [torch.stack([torch.as_tensor(row[f]) for row in rows]) for f in range(len(rows[0]))]
    return TensorBatch(fields if chosen else [field[:0] for field in fields], len(chosen))
