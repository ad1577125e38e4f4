"""mpirun over two simulated machines: network namespaces with their own host names, and a script instead of ssh."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.namespaces import CARD, NetnsMachines

NAMES = ("first", "second")


@contextmanager
def two_machines(folder: Path, learners: int, mbit: int = 1000) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the options of mpirun for `learners` ranks per machine, and the command prefix of the first machine."""
    with NetnsMachines(2, mbit) as machines:
        enter = [f"ip netns exec {machines.host(i)} unshare --uts sh -c 'hostname {NAMES[i]}; exec \"$@\"' sh" for i in (0, 1)]
        remote_shell, prefix = folder / "remote-shell", folder / "enter-first"
        # called as: remote-shell HOST COMMAND...; the command is for a shell
        remote_shell.write_text(f'#!/bin/sh\ntest "$1" = {machines.address(1)} || exit 1\nshift\nexec {enter[1]} sh -c "$*"\n')
        prefix.write_text(f'#!/bin/sh\nexec {enter[0]} "$@"\n')
        for script in (remote_shell, prefix):
            script.chmod(0o755)
        hosts = ",".join(f"{machines.address(i)}:{learners}" for i in (0, 1))
        options = ["--host", hosts, "--prtemca", "plm_ssh_agent", str(remote_shell), "--prtemca", "prte_if_include", CARD]
        yield [*options, "--mca", "btl_tcp_if_include", CARD], [str(prefix)]
