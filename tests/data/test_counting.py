"""Every epoch uses every example of an archive exactly once, with every strategy and one slow learner."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
from packed import corpus, packed
from torch import Tensor, nn

from roundelay.engine.config import TrainConfig
from roundelay.engine.trainer import train
from roundelay.launch.context import DistributedContext
from roundelay.launch.threads import run_threads
from roundelay.recipes.packed_task import PackedTask
from roundelay.strategies import STRATEGIES

EPOCHS = 2


class Counting(PackedTask):
    """Count the examples that gradients are computed on."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: Counter[tuple[int, int]] = Counter()
        self._count_lock = threading.Lock()

    def batch(self, epoch: int, start: int, stop: int) -> Any:
        numbers = self.examples.batch(epoch, start, stop).numbers
        return super().batch(epoch, start, stop), [(epoch, int(n)) for n in numbers]

    def loss(self, module: nn.Module, batch: Any) -> Tensor:
        with self._count_lock:
            self.seen.update(batch[1])
        return super().loss(module, batch[0])


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("counted")
    inputs = corpus(folder)
    archive = packed(folder / "archive", inputs, context=2)
    return {"archive": str(archive), "window": 21, "context": 2, "model": "tiny", "hidden": 4, "bottleneck": 3, **inputs}


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_epoch_sees_every_example_once(options: dict[str, Any], name: str) -> None:
    task = Counting(**options)
    strategy = "hierarchical(adpsgd)" if name == "hierarchical" else name
    simulate_nodes, size = (2, 4) if name == "hierarchical" else (0, 1 if name == "single" else 3)

    def learn(context: DistributedContext) -> dict[str, Any]:
        config = TrainConfig(
            strategy=strategy, straggler="1:4.0" if size > 1 else "", epochs=EPOCHS, batch=5, lr=0.01,
            eval_at_checkpoint=False, progress="none", num_workers=2,
        )  # fmt: skip
        return train(task, context, config)

    results = run_threads(learn, size=size, simulate_nodes=simulate_nodes, timeout_s=90.0)
    assert task.seen == {(epoch, n): 1 for epoch in range(EPOCHS) for n in range(task.samples)}
    assert all("loader_s" in r for r in results)
