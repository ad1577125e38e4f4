"""Variables of mpirun and srun become those of torchrun; a shell inside an allocation is not a launcher."""

from __future__ import annotations

import pytest

from roundelay.errors import UsageError
from roundelay.launch.context import under_launcher
from roundelay.launch.environment import (
    FIRST_PORT,
    PORTS,
    host_names,
    port_of,
    read_launcher_env,
    tasks_per_node,
)

STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "node[07-09]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}
"""Variables that srun sets for the fourth of five tasks on three nodes."""
BATCH = {
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_NODELIST": "node[07-09]",
    "SLURM_TASKS_PER_NODE": "4",
}
"""Variables in the shell of a batch script that has requested four tasks and started none."""
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-here-1@1",
}


def test_variables_of_torchrun_have_priority() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "5", **OPENMPI, **STEP}
    variables = read_launcher_env(env)
    assert variables == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "5"}


def test_open_mpi_on_one_machine() -> None:
    variables = read_launcher_env(OPENMPI)
    assert variables["RANK"] == variables["LOCAL_RANK"] == "2"
    assert variables["WORLD_SIZE"] == variables["LOCAL_WORLD_SIZE"] == "4"
    assert variables["MASTER_ADDR"] == "127.0.0.1"
    assert variables["MASTER_PORT"] == read_launcher_env({**OPENMPI, "OMPI_COMM_WORLD_RANK": "0"})["MASTER_PORT"]
    assert variables["MASTER_PORT"] != read_launcher_env({**OPENMPI, "PMIX_NAMESPACE": "prterun-here-2@1"})["MASTER_PORT"]


def test_open_mpi_on_several_machines_has_no_address_unless_set() -> None:
    several = {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert "MASTER_ADDR" not in read_launcher_env(several)
    variables = read_launcher_env({**several, "MASTER_ADDR": "first", "MASTER_PORT": "29500"})
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("first", "29500")


@pytest.mark.parametrize("local", [("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")])
def test_mpich_and_intel_mpi(local: tuple[str, str]) -> None:
    variables = read_launcher_env({"PMI_RANK": "1", "PMI_SIZE": "2", local[0]: "1", local[1]: "2"})
    assert (variables["RANK"], variables["WORLD_SIZE"], variables["LOCAL_RANK"], variables["MASTER_ADDR"]) == (
        "1",
        "2",
        "1",
        "127.0.0.1",
    )


def test_a_slurm_step() -> None:
    variables = read_launcher_env(STEP)
    assert variables == {
        "RANK": "3",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "node07",
        "MASTER_PORT": str(port_of("77.0")),
    }
    assert read_launcher_env({**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0"})["MASTER_PORT"] == variables["MASTER_PORT"]
    assert read_launcher_env({**STEP, "SLURM_STEP_NODELIST": "node07"})["MASTER_ADDR"] == "127.0.0.1"
    assert read_launcher_env({**STEP, "MASTER_ADDR": "ib-node07"})["MASTER_ADDR"] == "ib-node07"


def test_a_step_has_its_own_number_of_tasks() -> None:
    assert read_launcher_env({**STEP, "SLURM_NTASKS": "64"})["WORLD_SIZE"] == "5"


def test_srun_with_pmi2_uses_the_local_ranks_of_slurm() -> None:
    assert read_launcher_env({**STEP, "PMI_RANK": "3", "PMI_SIZE": "5"}) == read_launcher_env(STEP)


def test_mpirun_inside_an_allocation_has_priority_over_slurm() -> None:
    daemons = {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "3"}  # the step runs the daemons of mpirun
    assert read_launcher_env({**daemons, **OPENMPI})["RANK"] == "2"
    hydra = {**daemons, "PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    assert (read_launcher_env(hydra)["RANK"], read_launcher_env(hydra)["WORLD_SIZE"]) == ("2", "4")


@pytest.mark.parametrize(
    "env",
    [
        {},
        BATCH,
        {k: v for k, v in BATCH.items() if k != "SLURM_PROCID"},  # salloc, on the login node
        {**BATCH, "SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_STEP_NUM_TASKS": "4"},  # salloc with an interactive step
        {**BATCH, "SLURM_STEP_ID": str(0xFFFFFFFB)},  # the batch script as a step
        {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash in an allocation of four tasks
    ],
    ids=["nothing", "sbatch", "salloc", "interactive", "batch step", "pty"],
)
def test_a_shell_inside_an_allocation_is_not_a_rank(env: dict[str, str]) -> None:
    assert read_launcher_env(env) == {}
    assert not under_launcher(env)


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ("", []),
        ("gpu5", ["gpu5"]),
        ("a,b-1,c.d", ["a", "b-1", "c.d"]),
        ("n[01-03,07],gpu5", ["n01", "n02", "n03", "n07", "gpu5"]),
        ("n[8-10]", ["n8", "n9", "n10"]),
        ("n[008-010]x", ["n008x", "n009x", "n010x"]),
        ("r[1-2]n[08,10]", ["r1n08", "r1n10", "r2n08", "r2n10"]),
    ],
)
def test_host_lists_are_expanded(written: str, names: list[str]) -> None:
    assert host_names(written) == names


def test_an_invalid_host_list_is_named() -> None:
    with pytest.raises(UsageError, match=r"n\[a-b\]"):
        host_names("n[a-b]")


def test_task_counts_are_expanded() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_per_node("4") == [4]
    assert tasks_per_node("") == tasks_per_node("many") == []


def test_ports_stay_below_the_ephemeral_range() -> None:
    assert all(FIRST_PORT <= port_of(f"job {n}") < FIRST_PORT + PORTS <= 32768 for n in range(100))
