"""Natural-gradient SGD: the low-rank preconditioner equals dense matrices, keeps norms, and can be saved."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tasks import Dots
from torch import Tensor, nn

from roundelay.core.deferred import Gradient
from roundelay.core.flat import Flat
from roundelay.engine.config import TrainConfig
from roundelay.engine.trainer import train
from roundelay.launch.context import DistributedContext
from roundelay.launch.threads import run_threads
from roundelay.optim.adapter import OptimizerAdapter
from roundelay.optim.ngsgd import NGSGD, init_factor, precondition, subsample, update_factor

ALPHA = 4.0


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(factor: dict[str, Tensor]) -> Tensor:
    """Return F = R' D R + ρ I."""
    basis = factor["basis"]
    return basis.T @ torch.diag(factor["scale"]) @ basis + factor["floor"] * torch.eye(basis.shape[1], dtype=basis.dtype)


def skewed(n: int, dim: int, seed: int = 0) -> Tensor:
    """Return rows whose directions have very different norms."""
    return normal(n, dim, seed=seed) @ torch.diag(torch.logspace(1, -1, dim, dtype=torch.float64)) @ normal(dim, dim, seed=99)


def test_preconditioning_inverts_the_smoothed_dense_matrix() -> None:
    rows = skewed(40, 9)
    factor = init_factor(rows, 4)
    F = dense(factor)
    smoothed = F + ALPHA / 9 * F.trace() * torch.eye(9, dtype=F.dtype)
    beta = factor["floor"] * (1 + ALPHA) + ALPHA * factor["scale"].sum() / 9
    assert torch.allclose(precondition(factor, rows, ALPHA), beta * rows @ smoothed.inverse())


def test_in_a_fixed_subspace_the_low_rank_matrix_follows_the_exact_average() -> None:
    """Rows in three fixed directions: a matrix of rank three represents their moments exactly."""
    axes = torch.linalg.qr(normal(8, 3)).Q.T
    sizes = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)

    def rows(gain: float) -> Tensor:
        return gain * torch.cat([torch.diag(sizes), -torch.diag(sizes)]) @ axes

    factor, exact = init_factor(rows(1.0), 3), rows(1.0).T @ rows(1.0) / 6
    for _ in range(60):
        factor = update_factor(factor, rows(1.0), 0.5)
    assert torch.allclose(dense(factor), exact, atol=1e-5)
    for step, gain in enumerate((2.0, 0.5, 3.0)):
        x = rows(gain)
        exact = 0.3 * x.T @ x / 6 + 0.7 * exact
        factor = update_factor(factor, x, 0.3)
        assert torch.allclose(dense(factor), exact, rtol=1e-3, atol=1e-4), step


def test_the_trace_is_kept_and_the_basis_stays_orthonormal() -> None:
    factor = init_factor(skewed(30, 12), 5)
    for seed in range(1, 30):
        rows = skewed(30, 12, seed)
        expected = 0.4 * float(rows.square().sum()) / 30 + 0.6 * float(dense(factor).trace())
        factor = update_factor(factor, rows, 0.4)
        assert float(dense(factor).trace()) == pytest.approx(expected, rel=1e-6)
        assert torch.allclose(factor["basis"] @ factor["basis"].T, torch.eye(5, dtype=torch.float64), atol=1e-9)


def test_scale_has_no_influence_and_the_norm_is_kept() -> None:
    def walk(gain: float) -> list[Tensor]:
        p = nn.Parameter(torch.zeros(6, 10))
        optimizer = NGSGD([p], lr=1.0, max_change=0.0, rank_in=4, rank_out=3)
        updates = []
        for k in range(15):
            before = p.detach().clone()
            p.grad = gain * skewed(6, 10, k).float()
            optimizer.step()
            updates.append((before - p.detach()) / gain)
        return updates

    ones, thousands = walk(1.0), walk(1024.0)  # a power of two: floats scale exactly
    for k, (a, b) in enumerate(zip(ones, thousands, strict=True)):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(a.norm())), k
        assert float(a.norm()) == pytest.approx(float(skewed(6, 10, k).norm()), rel=1e-4)


def test_common_directions_shrink_and_rare_ones_grow() -> None:
    factor = init_factor(normal(200, 6) * torch.tensor([10.0, 1, 1, 1, 1, 1], dtype=torch.float64), 2)
    preconditioned = precondition(factor, torch.eye(6, dtype=torch.float64), 0.1)
    assert preconditioned[0, 0] < 0.3 < 0.8 < preconditioned[3, 3]


def test_a_linear_layer_uses_activations_unless_the_gradient_is_a_mean() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(12, 7)
    optimizer = NGSGD(layer.parameters(), lr=1.0, max_change=0.0, rank_in=5, rank_out=3).watch(layer)
    x, target = skewed(50, 12).float(), torch.randn(50, 7)
    (layer(x) - target).square().sum().backward()
    grad = layer.weight.grad.clone()  # type: ignore[union-attr]
    with torch.no_grad():
        outputs = 2 * (layer(x) - target)
    inside, outside = init_factor(x, 5), init_factor(outputs, 3)
    expected = precondition(outside, precondition(inside, grad, ALPHA).T, ALPHA).T
    for rows, factor in ((x, inside), (outputs, outside)):
        expected = expected * rows.norm() / precondition(factor, rows, ALPHA).norm()
    before = layer.weight.detach().clone()
    optimizer.step()
    assert torch.allclose(before - layer.weight.detach(), expected, rtol=1e-3, atol=1e-3 * float(expected.norm()))

    twins = [deepcopy(layer) for _ in range(2)]
    moved = []
    for number, twin in enumerate(twins):  # other activations, the same gradient: with `local_gradient` off the same step
        watched = NGSGD(twin.parameters(), lr=0.1, max_change=0.0).watch(twin)
        twin(skewed(50, 12, number).float()).sum().backward()
        twin.weight.grad, twin.bias.grad = grad.clone(), torch.zeros(7)
        watched.local_gradient = False
        watched.step()
        moved.append(twin.weight.detach().clone())
    assert torch.equal(moved[0], moved[1])


def test_activations_are_subsampled_evenly() -> None:
    assert subsample(torch.zeros(3, 1000, 4)).shape[0] <= 512
    assert subsample(torch.zeros(5, 4)).shape == (5, 4)


def test_max_change_bounds_the_step() -> None:
    p = nn.Parameter(torch.zeros(4, 5))
    optimizer = NGSGD([p], lr=10.0, max_change=0.5)
    p.grad = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    assert float(p.detach().norm()) == pytest.approx(0.5, rel=1e-5)


# ------------------------------------------------------------------------------------------------ through the engine


def build_module() -> nn.Module:
    torch.manual_seed(5)
    return nn.ModuleDict({"lstm": nn.LSTM(6, 5, batch_first=True), "out": nn.Linear(5, 4)})


def gradient(module: nn.Module, flat: Flat, k: int) -> Gradient:
    flat.clear_gradients()
    x = normal(3, 7, 6, seed=k).float()
    module["out"](module["lstm"](x)[0]).square().mean().backward()  # type: ignore[index]
    return Gradient(lambda: flat.phi, 3, 1.0, in_parameters=True)


def build() -> tuple[nn.Module, Flat, OptimizerAdapter]:
    module = build_module()
    flat = Flat(module)
    return module, flat, OptimizerAdapter(flat, NGSGD(module.parameters(), lr=0.3, momentum=0.9).watch(module))


def steps(module: nn.Module, flat: Flat, optimizer: OptimizerAdapter, numbers: Any) -> None:
    for k in numbers:
        (-optimizer.delta(gradient(module, flat, k))).add_to(flat.phi, flat.phi, True)


def test_a_saved_state_resumes_exactly() -> None:
    straight, resumed = build(), build()
    steps(*straight, range(14))
    tensors, numbers = straight[2].to_saved()
    resumed[1].phi.copy_(straight[1].phi)
    resumed[2].from_saved(deepcopy(tensors), deepcopy(numbers))
    for walk in (straight, resumed):
        steps(*walk, range(14, 25))
    assert torch.equal(straight[1].phi, resumed[1].phi)


def test_ranks_average_momentum_and_keep_their_factors() -> None:
    module, flat, optimizer = build()
    assert optimizer.state_vector().numel() == 0 or optimizer.state_vector().numel() == flat.phi.numel()
    steps(module, flat, optimizer, range(3))
    assert optimizer.state_vector().numel() == flat.phi.numel()  # momentum only
    before = {k: v.clone() for k, v in optimizer.to_saved()[0].items() if "basis" in k}
    optimizer.load_state_vector(torch.zeros(flat.phi.numel()))
    assert all(torch.equal(v, optimizer.to_saved()[0][k]) for k, v in before.items())
    idle = build()[2]
    assert idle.state_vector().numel() == flat.phi.numel()


def test_a_run_resumes_exactly(tmp_path: Path) -> None:
    def learn(context: DistributedContext, run: str, epochs: int, resume: str) -> None:
        config = TrainConfig(
            strategy="kaldi_averaging", strategy_options={"K": 3, "best_first": 0, "combine": 2}, deterministic_reduce=True,
            epochs=epochs, batch=4, optimizer="ngsgd", lr=0.05, run=str(tmp_path / run), resume=resume,
            eval_at_checkpoint=False,
            checkpoint_every_epochs=100, progress="none",
        )  # fmt: skip
        train(Dots(samples=60), context, config)

    for arguments in (("straight", 2, "no"), ("halves", 1, "no"), ("halves", 2, "auto")):
        run_threads(learn, *arguments, size=2)
    straight, halves = (sorted((tmp_path / run / "ckpt").glob("samples-*"))[-1] for run in ("straight", "halves"))
    assert straight.name == halves.name
    for shard in sorted(straight.glob("rank-*.safetensors")):
        ours, theirs = (load_file(str(folder / shard.name)) for folder in (straight, halves))
        assert {name for name in ours if not torch.equal(ours[name], theirs[name])} <= {"random"}  # threads share torch's RNG
    models = [load_file(str(tmp_path / run / "model.safetensors")) for run in ("straight", "halves")]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
