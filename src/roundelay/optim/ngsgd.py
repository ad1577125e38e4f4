"""Natural-gradient SGD.   Povey, Zhang & Khudanpur 2014, Parallel training of DNNs with natural gradient and averaging.

    G~ = γ  A^-1 G B^-1          G: the gradient of a matrix [out, in]; A, B: its Fisher factors on the output and input side

The Fisher matrix of an affine layer is approximated by A ⊗ B, A from the derivatives of its outputs, B from its inputs. Each
is low-rank plus identity, F = R' D R + ρ I (R has orthonormal rows), smoothed by a multiple of its trace, and updated online:

    F^  = F + α/dim tr(F) I  =  R' D R + β I          β F^-1 = I - R' E R,   E = D (D + β)^-1
    F  <- the best F of this form near   η X'X/N + (1 - η) F      one step of a power iteration, X: rows of N samples

γ restores the norm of the gradient, so learning rates mean the same as in plain SGD, and the scale of inputs, outputs and loss
does not influence the direction. A step uses the factors from before its own rows are added, as in the paper.

Rows X come from hooks on nn.Linear if the gradient is that of this rank. If activations are not accessible (the matrices of an
LSTM), or the gradient is a mean over ranks (sync, a hierarchy), the rows and columns of the gradient replace them: our choice,
not the paper's. Vectors (biases) take plain SGD steps; the paper treats a bias as one more input. The factors belong to one
rank. They are saved with it and never averaged, as in Kaldi, where they last for one job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 512
"""Maximum rows of activations used per step: enough for factors of rank 80."""
EAGER_STEPS = 10
"""First steps, which update the factors each."""
FIRST_UPDATES = 3
GRADIENT_FORGETTING = 0.1
"""η if rows of the gradient replace samples: a gradient is one observation, whatever the number of its rows."""
LEAST = 1e-10
SIDES = ("in", "out")


def init_factor(rows: Tensor, rank: int) -> dict[str, Tensor]:
    """Return a factor fitted to rows [n, dim]."""
    dim = rows.shape[1]
    rank = max(1, min(rank, dim - 1))
    start = torch.randn(dim, rank, generator=torch.Generator().manual_seed(dim), dtype=torch.float64)
    mean = max(float(rows.square().sum()) / rows.shape[0] / dim, LEAST)
    factor = {
        "basis": torch.linalg.qr(start).Q.T.to(rows).contiguous(),
        "scale": torch.full((rank,), LEAST).to(rows),
        "floor": torch.tensor(mean).to(rows),
    }
    for _ in range(FIRST_UPDATES):
        factor = update_factor(factor, rows, 0.9)
    return factor


def update_factor(factor: dict[str, Tensor], rows: Tensor, eta: float) -> dict[str, Tensor]:
    """Return the factor after an update with rows [n, dim] and forgetting eta."""
    basis, scale, floor = factor["basis"], factor["scale"], factor["floor"]
    (rank, dim), n = basis.shape, rows.shape[0]
    product = ((basis @ rows.T) @ rows) * (eta / n) + (1 - eta) * (scale + floor)[:, None] * basis
    wide = product.double()
    values, vectors = torch.linalg.eigh(wide @ wide.T)
    trace = eta * float(rows.square().sum(dtype=torch.float64)) / n + (1 - eta) * float(dim * floor + scale.sum())
    least = max(LEAST, 1e-7 * trace / dim)
    sizes = values.clamp_min(least * least).sqrt()
    directions = (vectors / sizes).T @ wide
    q, r = torch.linalg.qr(directions.T)  # rounding loses rare directions: orthonormalize again
    rest = max((trace - float(sizes.sum())) / max(dim - rank, 1), least)
    return {
        "basis": (q * torch.sign(torch.where(r.diagonal() == 0, 1.0, r.diagonal()))).T.to(basis).contiguous(),
        "scale": (sizes - rest).clamp_min(least).to(scale),
        "floor": torch.tensor(rest).to(floor),
    }


def precondition(factor: dict[str, Tensor], rows: Tensor, alpha: float) -> Tensor:
    """Return β rows F^-1: rows with their common directions scaled down."""
    basis, scale, floor = factor["basis"], factor["scale"], factor["floor"]
    beta = floor * (1 + alpha) + alpha * scale.sum() / basis.shape[1]
    return rows - ((rows @ basis.T) * (scale / (scale + beta))) @ basis


class NGSGD(torch.optim.Optimizer):
    """SGD on preconditioned gradients. The defaults are those of Kaldi's documentation.

    rank_in, rank_out   rank of the factors on the input and the output side
    alpha               smoothing of the factors towards a multiple of the identity
    update_period       steps between updates of the factors, after the first few
    history             number of samples over which the factors of a Linear average
    max_change          maximum norm of one step over all parameters; 0: no limit
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        rank_in: int = 20,
        rank_out: int = 80,
        alpha: float = 4.0,
        update_period: int = 4,
        history: float = 2000.0,
        max_change: float = 2.0,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "rank_in": rank_in, "rank_out": rank_out,
                "alpha": alpha, "update_period": update_period, "history": history, "max_change": max_change,
            },
        )  # fmt: skip
        self.local_gradient = True
        """True if the gradient in the parameters is that of this rank's last backward."""
        self._rows: dict[nn.Parameter, dict[str, Tensor]] = {}

    local_state = frozenset(f"{side}_{part}" for side in SIDES for part in ("basis", "scale", "floor"))
    """State that is never averaged over ranks: an average of bases is not a basis."""

    def watch(self, module: nn.Module) -> NGSGD:
        """Record inputs and output derivatives of every Linear of the module, by hooks. Returns self."""

        # a function, not a bound method: a deep copy of the module must not copy the optimizer
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self._record(layer, inputs[0], output)

        for layer in module.modules():
            if isinstance(layer, nn.Linear) and layer.weight.requires_grad:
                layer.register_forward_hook(hook)
        return self

    def _record(self, layer: nn.Module, inputs: Tensor, output: Tensor) -> None:
        weight = layer.weight
        if not (layer.training and torch.is_grad_enabled() and output.requires_grad and isinstance(weight, nn.Parameter)):
            return
        rows: dict[str, Tensor] = {"in": subsample(inputs)}
        self._rows[weight] = rows
        output.register_hook(lambda g: rows.__setitem__("out", subsample(g)))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters, and the factors if they are due."""
        loss = closure() if closure is not None else None
        steps: list[tuple[nn.Parameter, Tensor, float]] = []
        norm2, limit = 0.0, 0.0
        for group in self.param_groups:
            limit = max(limit, group["max_change"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = p.grad if not group["weight_decay"] else p.grad + group["weight_decay"] * p
                u = self._with_momentum(p, self._preconditioned(p, g, group), group)
                steps.append((p, u, group["lr"]))
                norm2 += float((group["lr"] * u).square().sum(dtype=torch.float64))
        scale = min(1.0, limit / (math.sqrt(norm2) + 1e-30)) if limit else 1.0
        for p, u, lr in steps:
            p.add_(u, alpha=-lr * scale)
        self._rows.clear()
        return loss

    def _with_momentum(self, p: nn.Parameter, u: Tensor, group: dict[str, Any]) -> Tensor:
        if not group["momentum"]:
            return u
        state = self.state[p]
        buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
        return buffer.mul_(group["momentum"]).add_(u)

    def _preconditioned(self, p: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[p]
        number = state["step"] = state.get("step", 0) + 1
        g = gradient.flatten(1) if gradient.dim() > 1 else gradient
        if g.dim() < 2 or min(g.shape) < 2:
            return gradient
        recorded = self._rows.get(p, {}) if self.local_gradient else {}
        watched = len(recorded) == 2
        rows = recorded if watched else {"in": g, "out": g.T}
        due = number <= EAGER_STEPS or number % group["update_period"] == 0
        direction, gamma = g, 1.0
        for side in SIDES:
            factor = {part: state[f"{side}_{part}"] for part in ("basis", "scale", "floor")} if number > 1 else None
            if factor is None:
                factor = init_factor(rows[side], group[f"rank_{side}"])
            if side == "in":
                direction = precondition(factor, direction, group["alpha"])
            else:
                direction = precondition(factor, direction.T, group["alpha"]).T
            if watched:
                gamma *= norm_ratio(rows[side], precondition(factor, rows[side], group["alpha"]))
            if due:
                n = rows[side].shape[0] * group["update_period"]
                eta = min(0.9, 1 - math.exp(-n / group["history"])) if watched else GRADIENT_FORGETTING
                factor = update_factor(factor, rows[side], eta)
            state.update({f"{side}_{part}": value for part, value in factor.items()})
        if not watched:
            gamma = norm_ratio(g, direction)
        return (direction * gamma).view_as(gradient)


def norm_ratio(before: Tensor, after: Tensor) -> float:
    """Return the factor that gives `after` the norm of `before`."""
    return float(before.norm()) / max(float(after.norm()), 1e-30)


def subsample(rows: Tensor) -> Tensor:
    """Return at most ROWS of the rows [..., dim], evenly spaced."""
    rows = rows.detach().flatten(0, -2)
    return rows[:: -(-rows.shape[0] // ROWS)]
