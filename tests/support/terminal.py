"""A command in a terminal of a given width, and what a person would have seen there."""

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
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def in_terminal(
    command: list[str],
    folder: Path,
    width: int,
    *,
    timeout_s: float = 100.0,
    **env: str,
) -> tuple[int, str]:
    """Exit code and everything that was written to the terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    kept = ("NO_COLOR", "COLUMNS", "FORCE_COLOR", *LAUNCHER_VARIABLES)
    base = {k: v for k, v in os.environ.items() if k not in kept}
    process = subprocess.Popen(
        command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env={**base, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **env},
    )  # fmt: skip
    os.close(theirs)
    seen, deadline = b"", time.monotonic() + timeout_s
    try:
        while True:
            ready, _, _ = select.select([ours], [], [], 0.2)
            try:
                piece = os.read(ours, 65536) if ready else b""
            except OSError:  # the other end is closed: all processes have ended
                break
            seen += piece
            if not piece and process.poll() is not None:
                break
            assert time.monotonic() < deadline, f"no end in {timeout_s:.0f} s\n{seen.decode(errors='replace')}"
        code = process.wait(max(1.0, deadline - time.monotonic()))
    finally:
        process.kill()
        os.close(ours)
    return code, seen.decode(errors="replace")


def lines_of(seen: str) -> list[str]:
    """What was drawn, line by line, without the codes that move the cursor or give colours."""
    return re.split(r"[\r\n]+", ESCAPE.sub("", seen))
