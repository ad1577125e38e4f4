"""Optimizers by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from roundelay.engine.config import TrainConfig
from roundelay.errors import UsageError, did_you_mean
from roundelay.optim.ngsgd import NGSGD

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "ngsgd": NGSGD,
}


def make_optimizer(config: TrainConfig, module: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a config for the trainable parameters of a module."""
    if config.optimizer not in OPTIMIZERS:
        raise UsageError(
            f"unknown optimizer '{config.optimizer}'", where="optimizer", hint=did_you_mean(config.optimizer, OPTIMIZERS)
        )
    settings: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer in ("sgd", "ngsgd"):
        settings["momentum"] = config.momentum
    optimizer = OPTIMIZERS[config.optimizer]((p for p in module.parameters() if p.requires_grad), **settings)
    return optimizer.watch(module) if isinstance(optimizer, NGSGD) else optimizer
