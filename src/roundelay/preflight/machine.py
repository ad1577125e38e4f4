"""What a run would find on this machine: versions, device, cores, memory, disk, addresses, ports."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from roundelay import config
from roundelay.errors import DataError, PeerLost, UsageError
from roundelay.fleet.store import JobStore, connect_store, serve_store
from roundelay.launch.context import choose_device, local_address_towards
from roundelay.version import __version__

LEAST_DISK_GB, LEAST_MEMORY_GB, LEAST_SHM_MB = 1.0, 1.0, 64.0
WRITE_BYTES = 8 << 20
LIBRARIES = ("torch", "numpy", "numba", "safetensors", "rich", "kaldi-decoder", "kaldifst", "espeakng-loader")
WANTED_FOR = {"espeakng-loader": "the extra 'synth', which the demo needs"}


@dataclass(frozen=True)
class CheckResult:
    what: str
    found: str
    state: str = "ok"
    """ok, warning or failure"""
    hint: str = ""
    code: int = 0
    """The exit code that a failure ends with: as the run would."""


def versions() -> dict[str, str]:
    found = {"roundelay": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


def look_at_versions() -> list[CheckResult]:
    found = versions()
    said = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    rows = [CheckResult("versions", said)]
    for name in (name for name, version in found.items() if not version):
        rows.append(CheckResult(name, "not installed", "warning", f"it is for {WANTED_FOR.get(name, 'a part of roundelay')}"))
    return rows


def look_at_device(name: str) -> CheckResult:
    import torch

    device = choose_device(name, 0)
    if device.type == "cuda" and not torch.cuda.is_available():
        return CheckResult("device", f"{device} is not usable here", "failure", "use device=cpu, or install torch with CUDA", 2)
    there = f"{torch.cuda.device_count()} GPUs" if torch.cuda.is_available() else "no GPU"
    return CheckResult("device", f"{device} ({platform.processor() or platform.machine()}, {there})")


def look_at_threads(learners: int) -> CheckResult:
    cores = len(os.sched_getaffinity(0))
    each = int(os.environ.get("OMP_NUM_THREADS", "1"))
    said = f"{cores} cores here, {each} thread{'s' * (each > 1)} per learner"
    if learners * each > cores:
        do = f"{learners} learners want {learners * each} threads: start fewer, or set OMP_NUM_THREADS=1"
        return CheckResult("cores", said, "warning", do)
    return CheckResult("cores", said)


def look_at_memory() -> CheckResult:
    free = available_memory() / 1e9
    if free < LEAST_MEMORY_GB:
        return CheckResult("memory", f"{free:.1f} GB free", "warning", "end other programs, or use a smaller model or batch")
    return CheckResult("memory", f"{free:.1f} GB free")


def available_memory() -> float:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    except OSError:
        pass
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))


def look_at_shared_memory() -> CheckResult:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return CheckResult("shared memory", "there is no /dev/shm", "warning", "use backend=torch")
    free = shutil.disk_usage(folder).free / 1e6
    if free < LEAST_SHM_MB:
        do = "use backend=torch, or give it more room (docker run --shm-size=1g)"
        return CheckResult("shared memory", f"{free:.0f} MB free in /dev/shm", "warning", do)
    return CheckResult("shared memory", f"{free / 1000:.1f} GB free in /dev/shm")


def look_at_disk(run: str) -> list[CheckResult]:
    """Where a run would be written: space, and whether writing works."""
    folder = Path(run or "runs")
    there = next(p for p in (folder, *folder.resolve().parents) if p.is_dir())
    free = shutil.disk_usage(there).free / 1e9
    space = CheckResult("disk", f"{free:.1f} GB free at {there}")
    if free < LEAST_DISK_GB:
        space = CheckResult(
            "disk", space.found, "warning", "free some space, or choose another run=DIR; checkpoints: keep_checkpoints=1"
        )
    try:
        began = time.perf_counter()
        with tempfile.NamedTemporaryFile(dir=there, prefix=".roundelay-check-") as file:
            file.write(os.urandom(WRITE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        rate = WRITE_BYTES / 1e6 / max(time.perf_counter() - began, 1e-9)
    except OSError as error:
        do = "choose another run=DIR"
        return [space, CheckResult("writing", f"{there}: {error.strerror}", "failure", do, DataError.exit_code)]
    return [space, CheckResult("writing", f"{WRITE_BYTES >> 20} MB at {rate:.0f} MB/s")]


def look_at_store(host: str, port: int) -> CheckResult:
    """Serves a store as `learners=N` would, and asks it something."""
    try:
        server = serve_store(host, port)
        store = JobStore(connect_store(host, server.port, 10.0))
        store.set("hello", "1")
        if store.get("hello") != "1":
            raise PeerLost("the store does not keep what it is told")
    except (UsageError, PeerLost) as error:
        return CheckResult("store", error.message, "failure", error.hint, error.exit_code)
    chosen = "a port the system chooses" if port == 0 else f"port {port}"
    return CheckResult("store", f"answers on {host}, {chosen}")


def interfaces() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return ", ".join(names)


def look_at_address(host: str, towards: str, port: int) -> CheckResult:
    address = local_address_towards(towards, port) if host == "auto" else host
    try:
        with socket.create_server((address, 0)):
            pass
    except OSError as error:
        do = f"host=… must be an address of this machine (interfaces: {interfaces()})"
        return CheckResult("address", f"{address}: {error.strerror}", "failure", do, UsageError.exit_code)
    try:
        ports = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except OSError:
        ports = ["1024", "65535"]
    reach = "only this machine" if address.startswith("127.") or address == "::1" else "other machines"
    said = f"{address} (reached by {reach}), agents on ports {ports[0]} to {ports[-1]}; interfaces: {interfaces()}"
    return CheckResult("address", said)


def this_machine(settings: config.TrainConfig) -> list[CheckResult]:
    return [
        *look_at_versions(),
        look_at_device(settings.device),
        look_at_threads(int(os.environ.get("LOCAL_WORLD_SIZE", settings.learners))),
        look_at_memory(),
        look_at_shared_memory(),
        *look_at_disk(settings.run),
    ]
