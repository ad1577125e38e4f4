"""Who may import whom, read from the source: the rules that import-linter's contracts cannot say.

torch.distributed          in comm, fleet.store, launch and benchmarks only
time, random, threading    never in strategy and topology
strategy, topology         nothing of ours but core, errors and progress; a strategy never another strategy
asr, feed                  nothing of ours but errors, interrupts and progress
report                     nothing of ours but core.events, errors and progress
"""

from __future__ import annotations

import ast

import pytest
from paths import ROOT

SOURCE = ROOT / "src"
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((SOURCE / "roundelay").rglob("*.py"))
}

MAY_DISTRIBUTE = ("roundelay.comm", "roundelay.fleet.store", "roundelay.launch", "benchmarks")
NO_CLOCK = ("roundelay.strategies", "roundelay.topology")
CLOCKS_AND_DICE = ("time", "random", "threading")
BASE = ("roundelay.errors", "roundelay.core.interrupts", "roundelay.core.process_map", "roundelay.log")
SHARED_BY_STRATEGIES = ("roundelay.strategies.base", "roundelay.strategies.worker", "roundelay.strategies.blocks")
MAY_IMPORT_OF_OURS = {
    "roundelay.strategies": ("roundelay.core", *BASE),
    "roundelay.topology": ("roundelay.core", *BASE),
    "roundelay.speech": BASE,
    "roundelay.data": BASE,
    "roundelay.report": ("roundelay.metrics.events", "roundelay.metrics.run_files", *BASE),
}


def inside(name: str, rooms: tuple[str, ...]) -> bool:
    return any(name == room or name.startswith(room + ".") for room in rooms)


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def names_used(source: str, module: str, is_package: bool = False) -> list[tuple[int, str]]:
    """Line and full name of everything imported, and of every use of torch.distributed as an attribute."""
    package = module if is_package else module.rpartition(".")[0]
    used: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            used += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join(parents[: len(parents) + 1 - node.level] + ([node.module] if node.module else []))
            used += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Attribute) and dotted(node) == "torch.distributed":
            used.append((node.lineno, "torch.distributed"))
    return used


def complaints(source: str, module: str, is_package: bool = False) -> list[str]:
    found = []
    for line, name in names_used(source, module, is_package):
        where = f"{module}, line {line}: "
        if inside(name, ("torch.distributed",)) and not inside(module, MAY_DISTRIBUTE):
            found.append(where + "torch.distributed belongs in comm, fleet.store and launch")
        if inside(name, CLOCKS_AND_DICE) and inside(module, NO_CLOCK):
            found.append(where + f"{name} makes the outcome depend on more than (seed, purpose, rank, step)")
        for room, allowed in MAY_IMPORT_OF_OURS.items():
            foreign = inside(name, ("roundelay",)) and not inside(name, (room, *allowed))
            if inside(module, (room,)) and foreign:
                found.append(where + f"{room} may not import {name}")
        a_strategy = module.startswith("roundelay.strategies.")
        if a_strategy and inside(name, ("roundelay.strategies",)) and not inside(name, (module, *SHARED_BY_STRATEGIES)):
            found.append(where + f"a strategy stands alone and may not import {name}")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_every_file_keeps_the_import_rules(module: str) -> None:
    path = MODULES[module]
    assert complaints(path.read_text(), module, path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("roundelay.core.flat", "import torch.distributed"),
        ("roundelay.core.flat", "import torch.distributed.rpc as rpc"),
        ("roundelay.engine.trainer", "from torch import distributed as dist"),
        ("roundelay.engine.trainer", "from torch.distributed import all_reduce"),
        ("roundelay.engine.trainer", "import torch\ntorch.distributed.barrier()"),
        ("roundelay.strategies.sync", "def step():\n    import time"),
        ("roundelay.strategies.sync", "from threading import Lock"),
        ("roundelay.topology", "import random"),
        ("roundelay.strategies.bmuf", "from .kstep import KStep"),
        ("roundelay.strategies.bmuf", "from . import kstep"),
        ("roundelay.strategies.sync", "from roundelay import topology"),
        ("roundelay.strategies.sync", "from roundelay.comm.shared_memory import Shm"),
        ("roundelay.speech.nnet.frame_task", "from roundelay.core import contracts"),
        ("roundelay.report.page", "from roundelay.core import flat"),
    ],
)
def test_the_rules_catch(module: str, source: str) -> None:
    assert complaints(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("roundelay.comm.torch_backend", "import torch.distributed as dist"),
        ("roundelay.launch.local", "from torch import distributed"),
        ("benchmarks.throughput", "import torch\ntorch.distributed.barrier()"),
        (
            "roundelay.strategies.sync",
            "from roundelay.strategies.worker import Worker\nfrom roundelay.errors import UsageError",
        ),
        ("roundelay.topology", "import numpy.random"),
        ("roundelay.speech.nnet.frame_task", "from .model import Model\nfrom roundelay.log.progress import bar"),
        ("roundelay.report.page", "from roundelay.metrics.events import Event"),
    ],
)
def test_the_rules_allow(module: str, source: str) -> None:
    assert complaints(source, module) == []


def test_the_strategy_table_may_import_its_files() -> None:
    assert complaints("from .sync import Sync", "roundelay.strategies", is_package=True) == []
