"""Tasks for deaths at exact points: their construction patches the engine in the process of one rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks import Dots


def rank() -> int:
    return int(os.environ.get("RANK", -1))


def die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner: Any, name: str, action: Callable[..., Any], when: Callable[..., bool] = lambda *_, **__: True) -> None:
    """Make every call of owner.name for which `when` holds run `action` first."""
    original = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        if when(*args, **options):
            action()
        return original(*args, **options)

    setattr(owner, name, call)


def fail_in_evaluation() -> None:
    from roundelay.engine.evaluator import Evaluator

    before(Evaluator, "evaluate", die, lambda *_, final=False: final)


def fail_writing_the_model() -> None:
    from roundelay.engine import finishing

    def half(tensors: Any, path: str) -> None:
        Path(path).write_bytes(b"half")
        die()

    finishing.save_file = half


def fail_after_arriving() -> None:
    from roundelay.engine.closing import ClosingAverage

    before(ClosingAverage, "_reduce", die)


def fail_before_agreeing() -> None:
    from roundelay.engine.closing import ClosingAverage

    before(ClosingAverage, "_agree", die)


def fail_completing_a_checkpoint() -> None:
    from roundelay.engine import checkpoint

    before(checkpoint, "rename_folder", die)


def raise_in_training() -> None:
    from roundelay.engine.learner import Learner

    def fail() -> None:
        raise OSError("the disk of this rank is gone")

    before(Learner, "run_step", fail, lambda self, *_: self.steps == 3)


def stop_in_an_average() -> None:
    """Stop this process for good while it holds the locks of its own vector and of its partner's."""
    from roundelay.core import kernels

    calls: list[int] = []

    def stop() -> None:
        calls.append(1)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGSTOP)

    before(kernels, "pair_average", stop)


@dataclass(frozen=True)
class Faulty(Dots):
    """Dots, with a fault in one rank: `fault` is the name of a function of this module."""

    fault: str = ""
    faulty_rank: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fault and rank() == self.faulty_rank:
            globals()[self.fault]()
