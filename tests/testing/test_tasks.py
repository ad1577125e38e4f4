"""The example tasks: shapes, reproducible data, every sample once per epoch."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from roundelay.core.contracts import Task
from roundelay.data.epoch_order import epoch_order
from roundelay.testing.tasks import TRAINING, VALIDATION, Blstm, FrameGenerator, SpeechlikeBatches, SyntheticFrames

SMALL = SyntheticFrames(samples=100, held_out=30)
TASKS = [SMALL, SpeechlikeBatches(samples=20, held_out=4), Blstm(pool=20)]
GENERATOR = FrameGenerator(world=3, phones=4, features=5, stay=0.5, noise=0.1, speaker=0.1)


@pytest.mark.parametrize("task", TASKS, ids=lambda t: type(t).__name__)
def test_is_a_task_and_has_a_gradient(task: Task) -> None:
    assert isinstance(task, Task)
    module = task.build()
    x, y = task.batch(0, 2, 5)
    assert x.shape[:2] == y.shape == (3, x.shape[1])
    loss = task.loss(module, (x, y))
    loss.backward()
    assert loss.ndim == 0
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("task", TASKS, ids=lambda t: type(t).__name__)
def test_the_parts_of_an_evaluation_add_up(task: Task) -> None:
    module = task.build()
    with torch.no_grad():
        whole = task.evaluate(module, 0, 1)
        results = [task.evaluate(module, part, 3) for part in range(3)]
    for name, (total, count) in whole.items():
        assert sum(s[name][1] for s in results) == count
        assert math.isclose(sum(s[name][0] for s in results), total, rel_tol=1e-4)
    assert "loss" in whole


def test_a_part_may_be_empty() -> None:
    task = SyntheticFrames(samples=8, held_out=2)
    with torch.no_grad():
        assert task.evaluate(task.build(), 6, 7) == {"loss": (0.0, 0.0), "accuracy": (0.0, 0.0)}


def test_an_untrained_network_has_the_loss_of_guessing() -> None:
    with torch.no_grad():
        loss, frames = SMALL.evaluate(SMALL.build(), 0, 1)["loss"]
    assert frames == 30 * 12
    assert loss / frames == pytest.approx(math.log(48), rel=0.1)


@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_has_every_sample_once(epoch: int) -> None:
    x, _ = SMALL._frames(SMALL.samples, TRAINING)
    cuts = [0, 1, 17, 64, 100]
    seen = torch.cat([SMALL.batch(epoch, a, b)[0] for a, b in pairwise(cuts)])
    order = epoch_order(SMALL.seed, epoch, SMALL.samples)
    assert sorted(order) == list(range(100))
    assert torch.equal(seen, x[torch.from_numpy(order)])


def test_a_batch_is_a_pure_function_of_its_arguments() -> None:
    again = SyntheticFrames(samples=100, held_out=30)
    assert all(map(torch.equal, SMALL.batch(3, 10, 20), again.batch(3, 10, 20)))
    assert not torch.equal(SMALL.batch(3, 10, 20)[0], SMALL.batch(4, 10, 20)[0])


def test_the_seed_orders_samples_and_the_world_generates_them() -> None:
    other_seed, other_world = SyntheticFrames(samples=100, seed=1), SyntheticFrames(samples=100, world=1)
    assert torch.equal(SMALL._frames(100, TRAINING)[0], other_seed._frames(100, TRAINING)[0])
    assert not torch.equal(SMALL.batch(0, 0, 50)[1], other_seed.batch(0, 0, 50)[1])
    assert not torch.equal(SMALL._frames(100, TRAINING)[0], other_world._frames(100, TRAINING)[0])


def test_frames_are_reproducible() -> None:
    x, y = GENERATOR.generate(6, 7, TRAINING)
    again = GENERATOR.generate(6, 7, TRAINING)
    assert x.shape == (6, 7, 5)
    assert x.dtype == torch.float32
    assert torch.equal(x, again[0])
    assert torch.equal(y, again[1])
    assert not torch.equal(x, GENERATOR.generate(6, 7, VALIDATION)[0])


def test_phones_run_from_left_to_right() -> None:
    states = GENERATOR.generate(200, 20, TRAINING)[1].numpy()
    before, after = states[:, :-1], states[:, 1:]
    ends, starts = before % 3 == 2, after % 3 == 0
    assert np.all((after == before) | (~ends & (after == before + 1)) | (ends & starts))


def test_paired_phones_share_the_mean_of_their_middle_state() -> None:
    quiet = FrameGenerator(world=0, phones=4, features=8, stay=1.0, noise=0.0, speaker=0.0)  # every chunk stays in one state
    x, y = quiet.generate(200, 3, TRAINING)
    mean = {int(state): x[i, 1] for i, state in enumerate(y[:, 0])}
    assert torch.allclose(mean[1], mean[4])
    assert not torch.allclose(mean[0], mean[3])


def test_speech_sized_networks_have_four_million_parameters() -> None:
    sizes = {sum(p.numel() for p in task.build().parameters()) for task in (Blstm(), SpeechlikeBatches())}
    assert len(sizes) == 1
    assert 3.8e6 < sizes.pop() < 4.3e6


def test_noise_comes_from_the_pool_at_every_position() -> None:
    task = Blstm()
    for start in (0, 255, 256, 100_000, task.samples - 64):
        assert task.batch(0, start, start + 64)[0].shape == (64, 21, 140)


def test_a_few_steps_lower_the_loss() -> None:
    torch.manual_seed(0)
    task = SyntheticFrames(samples=640, held_out=128)
    module = task.build()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9)
    for step in range(40):
        optimizer.zero_grad()
        task.loss(module, task.batch(step // 10, step % 10 * 64, step % 10 * 64 + 64)).backward()
        optimizer.step()
    with torch.no_grad():
        loss, frames = task.evaluate(module, 0, 1)["loss"]
    assert loss / frames < 0.8 * math.log(48)
