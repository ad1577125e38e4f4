"""Check this machine: versions, device, cores, memory, disk, addresses, ports."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from roundelay import config
from roundelay.core.contracts import Store
from roundelay.errors import DataError, PeerLost, UsageError
from roundelay.fleet.store import JobStore, connect_store, serve_store, wait_for_key
from roundelay.launch.context import choose_device, local_address_towards
from roundelay.version import __version__

MIN_DISK_GB, MIN_MEMORY_GB, MIN_SHM_MB = 1.0, 1.0, 64.0
WRITE_BYTES = 8 << 20
MARKER = ".roundelay-check-"
"""Prefix of the names of temporary files."""
MARKER_KEY = "run-marker"
LIBRARIES = ("torch", "numpy", "numba", "safetensors", "rich", "kaldi-decoder", "kaldifst", "espeakng-loader")
NEEDED_FOR = {"espeakng-loader": "the extra 'synth', which the demo needs"}


@dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    name: str
    detail: str
    state: str = "ok"
    """ok, warning or failure"""
    hint: str = ""
    code: int = 0
    """The exit code of a failure: the one with which a run would end."""


def versions() -> dict[str, str]:
    """Return the versions of roundelay, Python and the libraries; an empty string for those not installed."""
    table = {"roundelay": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            table[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            table[name] = ""
    return table


def check_versions() -> list[CheckResult]:
    table = versions()
    rows = [CheckResult("versions", ", ".join(f"{name} {version}" for name, version in table.items() if version))]
    for name in (name for name, version in table.items() if not version):
        hint = f"install it for {NEEDED_FOR.get(name, 'all features of roundelay')}"
        rows.append(CheckResult(name, "not installed", "warning", hint))
    return rows


def check_device(name: str) -> CheckResult:
    """Check that the device a run would choose is usable."""
    import torch

    device = choose_device(name, 0)
    if device.type == "cuda" and not torch.cuda.is_available():
        return CheckResult("device", f"{device} is not usable here", "failure", "use device=cpu, or install torch with CUDA", 2)
    gpus = f"{torch.cuda.device_count()} GPUs" if torch.cuda.is_available() else "no GPU"
    return CheckResult("device", f"{device} ({platform.processor() or platform.machine()}, {gpus})")


def check_threads(learners: int) -> CheckResult:
    """Warn if the learners of this machine use more threads than it has cores."""
    cores = len(os.sched_getaffinity(0))
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    detail = f"{cores} cores, {threads} thread{'s' * (threads > 1)} per learner"
    if learners * threads > cores:
        hint = f"start fewer learners, or set OMP_NUM_THREADS=1 ({learners} learners use {learners * threads} threads)"
        return CheckResult("cores", detail, "warning", hint)
    return CheckResult("cores", detail)


def check_memory() -> CheckResult:
    free = available_memory() / 1e9
    if free < MIN_MEMORY_GB:
        return CheckResult("memory", f"{free:.1f} GB free", "warning", "end other programs, or use a smaller model or batch")
    return CheckResult("memory", f"{free:.1f} GB free")


def available_memory() -> float:
    """Return the bytes of memory that new programs can use."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    except OSError:
        pass
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))


def check_shared_memory() -> CheckResult:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return CheckResult("shared memory", "/dev/shm does not exist", "warning", "use backend=torch")
    free = shutil.disk_usage(folder).free / 1e6
    if free < MIN_SHM_MB:
        hint = "use backend=torch, or enlarge /dev/shm (docker run --shm-size=1g)"
        return CheckResult("shared memory", f"{free:.0f} MB free in /dev/shm", "warning", hint)
    return CheckResult("shared memory", f"{free / 1000:.1f} GB free in /dev/shm")


def existing_parent(run: str) -> Path:
    """Return the run directory, or the folder nearest to it that exists."""
    folder = Path(run or "runs")
    return next(p for p in (folder, *folder.resolve().parents) if p.is_dir())


def check_disk(run: str) -> list[CheckResult]:
    """Check free space and write speed where the run directory would be. Leaves no file."""
    parent = existing_parent(run)
    free = shutil.disk_usage(parent).free / 1e9
    space = CheckResult("disk", f"{free:.1f} GB free at {parent}")
    if free < MIN_DISK_GB:
        hint = "free some space, choose another run=DIR, or set keep_checkpoints=1"
        space = CheckResult("disk", space.detail, "warning", hint)
    try:
        began = time.perf_counter()
        with tempfile.NamedTemporaryFile(dir=parent, prefix=MARKER) as file:
            file.write(os.urandom(WRITE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        rate = WRITE_BYTES / 1e6 / max(time.perf_counter() - began, 1e-9)
    except OSError as error:
        detail = f"cannot write to {parent}: {error.strerror}"
        return [space, CheckResult("writing", detail, "failure", "choose another run=DIR", DataError.exit_code)]
    return [space, CheckResult("writing", f"{WRITE_BYTES >> 20} MB at {rate:.0f} MB/s")]


def check_store(bind_address: str, port: int) -> CheckResult:
    """Serve a store as `learners=N` would, and write and read one key."""
    try:
        server = serve_store(bind_address, port)
        store = JobStore(connect_store(bind_address, server.port, 10.0))
        store.set("hello", "1")
        if store.get("hello") != "1":
            raise PeerLost("the store returned a wrong value", where="store", hint="choose another bind_address")
    except (UsageError, PeerLost) as error:
        return CheckResult("store", error.message, "failure", error.hint, error.exit_code)
    where = "a port the system chooses" if port == 0 else f"port {port}"
    return CheckResult("store", f"answers on {bind_address}, {where}")


@contextmanager
def shared_folder_marker(store: Store, run: str) -> Iterator[None]:
    """On rank 0: keep a temporary file at the run directory for `check_shared_folder` of other ranks inside the block."""
    with ExitStack() as stack:
        name = ""
        with suppress(OSError):  # reported by `check_disk`
            name = Path(stack.enter_context(tempfile.NamedTemporaryFile(dir=existing_parent(run), prefix=MARKER)).name).name
        store.set(MARKER_KEY, name)
        yield


def check_shared_folder(store: Store, run: str, rank: int, timeout_s: float) -> CheckResult:
    """Check on another rank than 0 that the run directory is that of rank 0. Blocks until rank 0 has created its file."""
    name = wait_for_key(store, MARKER_KEY, timeout_s, rank, lambda text: True, awaited=[0])
    if not name or (existing_parent(run) / name).exists():
        return CheckResult("run directory", f"run={run} is that of rank 0")
    return CheckResult(
        "run directory",
        f"run={run} of rank 0 is not visible here",
        "failure",
        "put the run directory on a disk that all machines share",
        UsageError.exit_code,
    )


def interfaces() -> str:
    """Return the names of the network interfaces, separated by commas."""
    return ", ".join(name for _, name in socket.if_nameindex())


def check_address(bind_address: str, target: str, port: int) -> CheckResult:
    """Check that a socket can listen at `bind_address`; `auto` means the address on the route to `target`."""
    address = local_address_towards(target, port) if bind_address == "auto" else bind_address
    try:
        with socket.create_server((address, 0)):
            pass
    except OSError as error:
        hint = f"set bind_address to an address of this machine (interfaces: {interfaces()})"
        return CheckResult("address", f"cannot listen on {address}: {error.strerror}", "failure", hint, UsageError.exit_code)
    try:
        ports = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except OSError:
        ports = ["1024", "65535"]
    scope = "this machine only" if address.startswith("127.") or address == "::1" else "other machines"
    detail = f"{address}, reachable from {scope}; gossip uses ports {ports[0]} to {ports[-1]}; interfaces: {interfaces()}"
    return CheckResult("address", detail)


def check_machine(settings: config.TrainConfig) -> list[CheckResult]:
    """Run all checks that need no other rank."""
    return [
        *check_versions(),
        check_device(settings.device),
        check_threads(int(os.environ.get("LOCAL_WORLD_SIZE", settings.learners))),
        check_memory(),
        check_shared_memory(),
        *check_disk(settings.run),
    ]
