"""Run a command in a pseudo-terminal of a chosen width and return what it displayed."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from pathlib import Path

from command import LAUNCHER_VARIABLES

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOR = re.compile(r"\x1b\[[0-9;]*m")


def in_terminal(
    command: list[str],
    folder: Path,
    width: int,
    *,
    timeout_s: float = 100.0,
    **env: str,
) -> tuple[int, str]:
    """Return the exit code and everything written to the terminal."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    removed = ("NO_COLOR", "COLUMNS", "FORCE_COLOR", *LAUNCHER_VARIABLES)
    base = {k: v for k, v in os.environ.items() if k not in removed}
    process = subprocess.Popen(
        command, cwd=folder, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        env={**base, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **env},
    )  # fmt: skip
    os.close(slave)
    output, deadline = b"", time.monotonic() + timeout_s
    try:
        while True:
            ready, _, _ = select.select([master], [], [], 0.2)
            try:
                data = os.read(master, 65536) if ready else b""
            except OSError:  # the slave end is closed: all processes have ended
                break
            output += data
            if not data and process.poll() is not None:
                break
            assert time.monotonic() < deadline, f"not finished within {timeout_s:.0f} s\n{output.decode(errors='replace')}"
        code = process.wait(max(1.0, deadline - time.monotonic()))
    finally:
        process.kill()
        os.close(master)
    return code, output.decode(errors="replace")


def lines_of(output: str) -> list[str]:
    """Return the displayed lines without cursor movements and colors."""
    return re.split(r"[\r\n]+", ESCAPE.sub("", output))
