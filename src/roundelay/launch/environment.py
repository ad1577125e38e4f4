"""Environment variables of launchers, translated to those of torchrun.

torchrun    RANK, WORLD_SIZE, ...: used unchanged, before any other
mpirun      OMPI_COMM_WORLD_* (Open MPI), MV2_COMM_WORLD_* (MVAPICH), PMI_* with MPI_LOCAL* or PMI_LOCAL_* (MPICH, Intel, Cray)
srun        SLURM_PROCID, SLURM_STEP_*: only in a step of several tasks. The shell of an allocation (salloc, sbatch) has many
            of these variables too, but runs one process
"""

from __future__ import annotations

import itertools
import os
import re
import zlib
from collections.abc import Mapping

from roundelay.errors import UsageError

FIRST_PORT, PORTS = 20000, 12000
"""Range of the store's port if no port is set: below the ephemeral ports of the system."""
FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Lowest step number that Slurm uses for the shells of its allocations."""

MPIRUNS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)
"""Rank, size, local rank and local size, as each MPI names them."""


def read_launcher_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for this process; empty without a launcher.

    MASTER_ADDR and MASTER_PORT are missing if mpirun has started ranks on several machines: only MPI can distribute them then.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        return {key: env[key] for key in TORCHRUN if key in env}
    variables = _mpirun(env) or _srun(env)
    if variables:
        variables |= {key: env[key] for key in ("MASTER_ADDR", "MASTER_PORT") if key in env}
    return variables


TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def _mpirun(env: Mapping[str, str]) -> dict[str, str]:
    complete = [names for names in MPIRUNS if all(name in env for name in names)]
    partial = [names for names in MPIRUNS if names[0] in env and names[1] in env]
    if not partial:
        return {}
    names = (complete or partial)[0]
    variables = dict(zip(("RANK", "WORLD_SIZE"), (env[name] for name in names[:2]), strict=True))
    if complete:
        variables |= {"LOCAL_RANK": env[names[2]], "LOCAL_WORLD_SIZE": env[names[3]]}
    else:  # srun --mpi=pmi2 sets only the rank and size for MPI; the rest is in Slurm's variables
        slurm = _srun(env)
        if slurm and (slurm["RANK"], slurm["WORLD_SIZE"]) == (variables["RANK"], variables["WORLD_SIZE"]):
            return slurm
    if variables.get("LOCAL_WORLD_SIZE") == variables["WORLD_SIZE"]:
        job = env.get("PMIX_NAMESPACE") or f"{os.getppid()}"  # all ranks of one machine have the same parent
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port_of(job))}
    return variables


def _srun(env: Mapping[str, str]) -> dict[str, str]:
    step, rank = env.get("SLURM_STEP_ID", ""), env.get("SLURM_PROCID", "")
    size = env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS", "")
    if not (step.isdigit() and rank.isdigit() and size.isdigit()) or int(step) >= FIRST_SPECIAL_STEP or int(size) < 2:
        return {}
    variables = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": env.get("SLURM_LOCALID", "0")}
    node = env.get("SLURM_NODEID", "0")
    variables["GROUP_RANK"] = node
    counts = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", ""))
    if int(node) < len(counts):
        variables["LOCAL_WORLD_SIZE"] = str(counts[int(node)])
    nodes = host_names(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST", ""))
    if nodes:
        variables["MASTER_ADDR"] = nodes[0] if len(nodes) > 1 else "127.0.0.1"
        variables["MASTER_PORT"] = str(port_of(f"{env.get('SLURM_JOB_ID', '')}.{step}"))
    return variables


def port_of(job: str) -> int:
    """Derive a port from the name of the job, the same on all ranks."""
    return FIRST_PORT + zlib.crc32(job.encode()) % PORTS


def host_names(hostlist: str) -> list[str]:
    """Expand Slurm's list of hosts: n[01-03,07],gpu5 is n01 n02 n03 n07 gpu5."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", hostlist):
        pieces = re.split(r"\[([^\]]*)\]", part.strip())  # text, numbers, text, numbers, ..., text
        choices = [_expand_range(piece, hostlist) if i % 2 else [piece] for i, piece in enumerate(pieces)]
        names += ["".join(combination) for combination in itertools.product(*choices)]
    return names


def _expand_range(ranges: str, hostlist: str) -> list[str]:
    numbers: list[str] = []
    for piece in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece.strip())
        if match is None:
            raise UsageError(f"parsing the host list '{hostlist}' failed", where="SLURM_STEP_NODELIST", hint="set MASTER_ADDR")
        first, last = match[1], match[2] or match[1]
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


def tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's list of counts: 2(x3),1 is 2 2 2 1. Return an empty list if it cannot be parsed."""
    counts: list[int] = []
    for piece in text.split(",") if text else []:
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", piece.strip())
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
