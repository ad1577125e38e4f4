"""Whoever starts the ranks of a job says so in environment variables, each in its own words; here they become torchrun's.

torchrun    RANK, WORLD_SIZE, ...: taken as they are, and before any other
mpirun      OMPI_COMM_WORLD_* (Open MPI), MV2_COMM_WORLD_* (MVAPICH), PMI_* with MPI_LOCAL* or PMI_LOCAL_* (MPICH, Intel, Cray)
srun        SLURM_PROCID, SLURM_STEP_*: only inside a step of several tasks. In the shell of an allocation (salloc, sbatch) many
            of these variables stand too, and only one process runs
"""

from __future__ import annotations

import itertools
import os
import re
import zlib
from collections.abc import Mapping

from roundelay.errors import UsageError

FIRST_PORT, PORTS = 20000, 12000
"""Where the port of a job's store is looked for when nobody has named one: below the ports the system deals out by itself."""
FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm numbers the shells of its allocations as steps too, from here on."""

MPIRUNS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)
"""Rank, size, rank on the machine, ranks of the machine, in the words of each."""


def read_launcher_env(env: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables as far as this process's launcher allows to say them; empty without a launcher. MASTER_ADDR and
    MASTER_PORT are missing where mpirun has started ranks on several machines: only MPI can then pass them on."""
    if "RANK" in env and "WORLD_SIZE" in env:
        return {key: env[key] for key in TORCHRUN if key in env}
    found = _mpirun(env) or _srun(env)
    if found:
        found |= {key: env[key] for key in ("MASTER_ADDR", "MASTER_PORT") if key in env}
    return found


TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def _mpirun(env: Mapping[str, str]) -> dict[str, str]:
    complete = [names for names in MPIRUNS if all(name in env for name in names)]
    partial = [names for names in MPIRUNS if names[0] in env and names[1] in env]
    if not partial:
        return {}
    names = (complete or partial)[0]
    found = dict(zip(("RANK", "WORLD_SIZE"), (env[name] for name in names[:2]), strict=True))
    if complete:
        found |= {"LOCAL_RANK": env[names[2]], "LOCAL_WORLD_SIZE": env[names[3]]}
    else:  # srun --mpi=pmi2 tells MPI the rank alone; Slurm itself knows the rest
        slurm = _srun(env)
        if slurm and (slurm["RANK"], slurm["WORLD_SIZE"]) == (found["RANK"], found["WORLD_SIZE"]):
            return slurm
    if found.get("LOCAL_WORLD_SIZE") == found["WORLD_SIZE"]:
        job = env.get("PMIX_NAMESPACE") or f"{os.getppid()}"  # the ranks of one machine have one parent
        found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port_of(job))}
    return found


def _srun(env: Mapping[str, str]) -> dict[str, str]:
    step, rank = env.get("SLURM_STEP_ID", ""), env.get("SLURM_PROCID", "")
    size = env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS", "")
    if not (step.isdigit() and rank.isdigit() and size.isdigit()) or int(step) >= FIRST_SPECIAL_STEP or int(size) < 2:
        return {}
    found = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": env.get("SLURM_LOCALID", "0")}
    node = env.get("SLURM_NODEID", "0")
    found["GROUP_RANK"] = node
    counts = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", ""))
    if int(node) < len(counts):
        found["LOCAL_WORLD_SIZE"] = str(counts[int(node)])
    nodes = host_names(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST", ""))
    if nodes:
        found["MASTER_ADDR"] = nodes[0] if len(nodes) > 1 else "127.0.0.1"
        found["MASTER_PORT"] = str(port_of(f"{env.get('SLURM_JOB_ID', '')}.{step}"))
    return found


def port_of(job: str) -> int:
    """A port that all ranks of a job agree on without a word."""
    return FIRST_PORT + zlib.crc32(job.encode()) % PORTS


def host_names(written: str) -> list[str]:
    """Slurm's short form of host names, written out: n[01-03,07],gpu5 are n01 n02 n03 n07 gpu5."""
    found: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", written):
        pieces = re.split(r"\[([^\]]*)\]", part.strip())  # text, numbers, text, numbers, ..., text
        choices = [_numbers(piece, written) if i % 2 else [piece] for i, piece in enumerate(pieces)]
        found += ["".join(chosen) for chosen in itertools.product(*choices)]
    return found


def _numbers(ranges: str, written: str) -> list[str]:
    found: list[str] = []
    for piece in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece.strip())
        if match is None:
            raise UsageError(f"cannot read the list of hosts '{written}'", where="SLURM_STEP_NODELIST", hint="set MASTER_ADDR")
        first, last = match[1], match[2] or match[1]
        found += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return found


def tasks_per_node(written: str) -> list[int]:
    """Slurm's short form of counts, written out: 2(x3),1 is 2 2 2 1."""
    found: list[int] = []
    for piece in written.split(",") if written else []:
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", piece.strip())
        if match is None:
            return []
        found += [int(match[1])] * int(match[2] or 1)
    return found
