"""Averaging as Kaldi's scripts do it: the best replica first, the last averages combined."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tasks import Dots

from roundelay.engine.config import TrainConfig
from roundelay.engine.learner import Learner
from roundelay.engine.trainer import train
from roundelay.errors import UsageError
from roundelay.launch.context import DistributedContext
from roundelay.launch.threads import run_threads
from roundelay.strategies import build

SIZE, K = 2, 3
DEFAULTS = {"K": K, "best_first": 0, "combine": 0}


def run(folder: Path, epochs: float, **settings: Any) -> tuple[list[list[torch.Tensor]], torch.Tensor]:
    """Return the weights of every rank after every step, and the final model."""
    walks: list[list[torch.Tensor]] = [[] for _ in range(SIZE)]

    def learn(context: DistributedContext) -> None:
        def append_weights(learner: Learner) -> None:
            walks[context.rank].append(learner.worker.w.clone())

        config = TrainConfig(
            strategy="kaldi_averaging", strategy_options=DEFAULTS | settings, deterministic_reduce=True,
            epochs=epochs, batch=5, lr=0.1, run=str(folder), eval_at_checkpoint=False, progress="none",
        )  # fmt: skip
        train(Dots(samples=120), context, config, on_step=append_weights)

    run_threads(learn, size=SIZE)
    model = load_file(str(folder / "model.safetensors"))
    order = [name for name in Dots().build().state_dict() if name in dict(Dots().build().named_parameters())]
    return walks, torch.cat([model[name].reshape(-1) for name in order])


@pytest.mark.parametrize("epochs", [1.0, 1.25])  # 12 steps, whose last block is whole; 15 with epochs of 12
def test_the_final_model_is_the_mean_of_the_last_averages(tmp_path: Path, epochs: float) -> None:
    walks, final = run(tmp_path, epochs, combine=3)
    steps = len(walks[0])
    averages = [walks[0][k] for k in range(K - 1, steps, K)]
    expected = torch.stack(averages[-3:]).double().mean(0)
    assert torch.allclose(final.double(), expected, atol=1e-6)
    assert not torch.allclose(final, averages[-1], atol=1e-6)


def test_a_short_last_block_is_combined(tmp_path: Path) -> None:
    walks, final = run(tmp_path, 110 / 120, combine=2)  # eleven steps: three blocks and two steps
    assert len(walks[0]) == 11
    last = torch.stack([walks[rank][-1] for rank in range(SIZE)]).mean(0)
    assert torch.allclose(final, (walks[0][8] + last) / 2, atol=1e-6)


def test_the_first_averages_take_the_best_replica(tmp_path: Path) -> None:
    walks, _ = run(tmp_path, 1.0, best_first=2)
    plain, _ = run(tmp_path / "plain", 1.0)
    own = [plain[rank][K - 2] for rank in range(SIZE)]  # before the first average nothing differs
    assert all(torch.equal(walks[rank][K - 2], own[rank]) for rank in range(SIZE))
    assert torch.equal(walks[0][K - 1], walks[1][K - 1])
    assert not torch.allclose(walks[0][K - 1], plain[0][K - 1])


def test_combine_needs_static_sharding() -> None:
    with pytest.raises(UsageError, match="dynamic"):
        build("kaldi_averaging", {"combine": 3, "sharding": "dynamic"})
