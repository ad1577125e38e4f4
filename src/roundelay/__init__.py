"""Roundelay: distributed training in which learners talk to their neighbours, one step behind.

with roundelay.join(module, optimizer, strategy="adpsgd") as learner:      # any torch module, under torchrun or alone
    for batch in learner.claim(dataset, batch=64):
        learner.step(lambda: loss(module(batch.x), batch.y), samples=len(batch))
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from roundelay.version import __version__

# numba colours its messages through colorama, where that is installed, which then writes an escape code behind all output
os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")

__all__ = ["__version__", "fit", "join"]

if TYPE_CHECKING:
    from roundelay.api.session import fit, join


def __getattr__(name: str) -> Any:
    # torch and the compiler of the kernels take seconds to import: only when they are needed
    if name in ("join", "fit"):
        from roundelay.api import session

        return getattr(session, name)
    raise AttributeError(f"module 'roundelay' has no attribute '{name}'")
