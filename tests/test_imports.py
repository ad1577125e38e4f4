"""Rules on imports and calls that the contracts of import-linter cannot express, checked on the source.

torch.distributed           only in comm.torch_backend, comm.torch_store and launch
greenlet                    only in simulate, replay and api
time, random, threading …   never in strategies, topology, theory and comm.gossip.protocol
strategies, topology        import nothing of this package but core, errors and log; no strategy imports another
speech, data                import nothing of this package but core.process_map, core.interrupts, errors and log
report                      imports nothing of this package but metrics.events, errors and log
print()                     only in cli and log
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

ONLY_IN = {
    "torch.distributed": (
        "roundelay.comm.torch_backend",
        "roundelay.comm.torch_store",
        "roundelay.launch",
        "roundelay.bench",
        "benchmarks",
    ),
    "greenlet": ("roundelay.simulate", "roundelay.replay", "roundelay.api"),
}
PURE = ("roundelay.strategies", "roundelay.topology", "roundelay.theory", "roundelay.comm.gossip.protocol")
IMPURE = ("time", "random", "threading", "socket", "selectors")
BASE = (
    "roundelay.errors",
    "roundelay.log",
    "roundelay.core.interrupts",
    "roundelay.core.process_map",
    "roundelay.core.settings",
)
SHARED_BY_STRATEGIES = tuple(f"roundelay.strategies.{name}" for name in ("base", "blocks", "step", "worker"))
MAY_IMPORT = {
    "roundelay.strategies": ("roundelay.core", *BASE),
    "roundelay.topology": ("roundelay.core", *BASE),
    "roundelay.speech": BASE,
    "roundelay.data": BASE,
    "roundelay.report": ("roundelay.metrics.events", "roundelay.metrics.gaps", "roundelay.metrics.run_files", *BASE),
    "roundelay.comm.gossip": (
        "roundelay.core",
        "roundelay.comm.shared_memory",
        "roundelay.comm.vectors",
        "roundelay.fleet",
        *BASE,
    ),
}
MAY_PRINT = ("roundelay.cli", "roundelay.log")


def inside(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imported_names(tree: ast.AST, module: str, is_package: bool) -> list[tuple[int, str]]:
    """Return line and full name of every import, and of every use of torch.distributed as an attribute."""
    package = module if is_package else module.rpartition(".")[0]
    names: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join(parents[: len(parents) + 1 - node.level] + ([node.module] if node.module else []))
            names += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Attribute) and dotted(node) == "torch.distributed":
            names.append((node.lineno, "torch.distributed"))
    return names


def broken_rules(source: str, module: str, is_package: bool = False) -> list[str]:
    tree = ast.parse(source)
    broken = []
    for line, name in imported_names(tree, module, is_package):
        where = f"{module}, line {line}: "
        for restricted, packages in ONLY_IN.items():
            if inside(name, (restricted,)) and not inside(module, packages):
                broken.append(where + f"{restricted} may be imported only in {', '.join(packages)}")
        if inside(name, IMPURE) and inside(module, PURE):
            broken.append(where + f"{name} makes the result depend on more than the arguments")
        for package, allowed in MAY_IMPORT.items():
            foreign = inside(name, ("roundelay",)) and not inside(name, (package, *allowed))
            if inside(module, (package,)) and foreign:
                broken.append(where + f"{package} may not import {name}")
        is_strategy = module.startswith("roundelay.strategies.")
        if is_strategy and inside(name, ("roundelay.strategies",)) and not inside(name, (module, *SHARED_BY_STRATEGIES)):
            broken.append(where + f"a strategy may not import another one: {name}")
    return broken


def print_calls(source: str) -> list[int]:
    """Return the lines of calls of print()."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


@pytest.mark.parametrize("module", MODULES)
def test_every_module_follows_the_import_rules(module: str) -> None:
    path = MODULES[module]
    assert broken_rules(path.read_text(), module, path.name == "__init__.py") == []


@pytest.mark.parametrize("module", [module for module in MODULES if not inside(module, MAY_PRINT)])
def test_only_cli_and_log_print(module: str) -> None:
    assert print_calls(MODULES[module].read_text()) == [], f"{module} must use logging"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("roundelay.core.flat", "import torch.distributed"),
        ("roundelay.core.flat", "import torch.distributed.rpc as rpc"),
        ("roundelay.comm.mpi_backend", "from torch import distributed"),
        ("roundelay.engine.trainer", "from torch import distributed as dist"),
        ("roundelay.engine.trainer", "from torch.distributed import all_reduce"),
        ("roundelay.engine.trainer", "import torch\ntorch.distributed.barrier()"),
        ("roundelay.engine.learner", "from greenlet import greenlet"),
        ("roundelay.strategies.sync", "def step():\n    import time"),
        ("roundelay.strategies.sync", "from threading import Lock"),
        ("roundelay.topology.matchings", "import random"),
        ("roundelay.theory", "import time"),
        ("roundelay.comm.gossip.protocol", "import socket"),
        ("roundelay.comm.gossip.thread", "from roundelay.comm.torch_backend import TorchCommunicator"),
        ("roundelay.strategies.bmuf", "from .kstep import KStep"),
        ("roundelay.strategies.bmuf", "from . import kstep"),
        ("roundelay.strategies.sync", "from roundelay import topology"),
        ("roundelay.strategies.sync", "from roundelay.comm.shared_memory import ShmVectors"),
        ("roundelay.speech.nnet.frame_task", "from roundelay.core import contracts"),
        ("roundelay.report.page", "from roundelay.core import flat"),
    ],
)
def test_a_broken_rule_is_detected(module: str, source: str) -> None:
    assert broken_rules(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("roundelay.comm.torch_backend", "import torch.distributed as dist"),
        ("roundelay.launch.local", "from torch import distributed"),
        ("benchmarks.throughput", "import torch\ntorch.distributed.barrier()"),
        ("roundelay.simulate.event_loop", "import greenlet"),
        (
            "roundelay.strategies.sync",
            "from roundelay.strategies.worker import Worker\nfrom roundelay.errors import UsageError",
        ),
        ("roundelay.topology.matchings", "import numpy.random"),
        ("roundelay.comm.gossip.thread", "from .transport import Connection\nfrom roundelay.core.wait import wait_until"),
        ("roundelay.speech.nnet.frame_task", "from .model import Model\nfrom roundelay.log.progress import Progress"),
        ("roundelay.report.page", "from roundelay.metrics.events import Event"),
    ],
)
def test_an_allowed_import_is_accepted(module: str, source: str) -> None:
    assert broken_rules(source, module) == []


def test_the_table_of_strategies_may_import_their_files() -> None:
    assert broken_rules("from .sync import Sync", "roundelay.strategies", is_package=True) == []


def test_print_calls_are_detected_in_code_only() -> None:
    assert print_calls("x = 1\nprint(x)\n'print(x)'\nself.print(x)\n# print(x)") == [2]
