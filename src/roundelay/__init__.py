"""Roundelay: asynchronous decentralized data-parallel training for PyTorch.

with roundelay.Session(module, optimizer, strategy="adpsgd") as session:      # any torch module, under torchrun or alone
    for batch in session.loader(dataset, batch_size=64):
        session.step(partial(loss_of, batch), samples=len(batch))
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from roundelay.version import __version__

# numba colors its messages through colorama, if installed, which then appends an escape code to all output
os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")

__all__ = ["Session", "Strategy", "Traits", "Worker", "__version__", "check_strategy", "fit"]

if TYPE_CHECKING:
    from roundelay.api.fit import fit
    from roundelay.api.session import Session
    from roundelay.strategies.base import Strategy, Traits
    from roundelay.strategies.worker import Worker
    from roundelay.testing.conformance import check_strategy

_MODULES = {
    "Session": "roundelay.api.session",
    "Strategy": "roundelay.strategies.base",
    "Traits": "roundelay.strategies.base",
    "Worker": "roundelay.strategies.worker",
    "check_strategy": "roundelay.testing.conformance",
    "fit": "roundelay.api.fit",
}


def __getattr__(name: str) -> Any:
    """Import public names on first use: torch and the compiled kernels take seconds to import."""
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'roundelay' has no attribute '{name}'")
