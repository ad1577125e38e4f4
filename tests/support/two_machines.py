"""mpirun over two machines made of network namespaces, each with a host name of its own. No ssh: a script takes its context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.namespaces import CARD, NetnsMachines

NAMES = ("first", "second")


@contextmanager
def two_machines(folder: Path, learners: int, mbit: int = 1000) -> Iterator[tuple[list[str], list[str]]]:
    """Options of mpirun for that many learners on each machine, and the command that starts mpirun on the first."""
    with NetnsMachines(2, mbit) as machines:
        enter = [f"ip netns exec {machines.host(i)} unshare --uts sh -c 'hostname {NAMES[i]}; exec \"$@\"' sh" for i in (0, 1)]
        agent, door = folder / "agent", folder / "enter-first"
        # called as: agent HOST COMMAND...; the command is one for a shell
        agent.write_text(f'#!/bin/sh\ntest "$1" = {machines.address(1)} || exit 1\nshift\nexec {enter[1]} sh -c "$*"\n')
        door.write_text(f'#!/bin/sh\nexec {enter[0]} "$@"\n')
        for script in (agent, door):
            script.chmod(0o755)
        hosts = ",".join(f"{machines.address(i)}:{learners}" for i in (0, 1))
        options = ["--host", hosts, "--prtemca", "plm_ssh_agent", str(agent), "--prtemca", "prte_if_include", CARD]
        yield [*options, "--mca", "btl_tcp_if_include", CARD], [str(door)]
