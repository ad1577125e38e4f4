"""Run a training command under a hard time limit, and look at what it leaves behind.

Every process that a command starts becomes a descendant of this process, even if its parent dies (`PR_SET_CHILD_SUBREAPER`).
So orphans are found without a name to look for, and the end of a run kills all of them. One run at a time.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

SHM = Path("/dev/shm")
ROOT = Path(__file__).resolve().parents[1]
_libc = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
spared: set[int] = set()
"""Children of this process that are not part of a run, such as a switch."""


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose parent exits."""
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _parents() -> dict[int, tuple[int, str]]:
    """Return parent and state of every process."""
    table = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError, IndexError, ValueError):
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                table[int(entry)] = (int(fields[1]), fields[0])
    return table


def descendants(root: int, *, zombies: bool = False) -> list[int]:
    """Return the process ids of all descendants, parents before children."""
    table = _parents()
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    queue, pids = [root], []
    while queue:
        for pid in sorted(children.get(queue.pop(0), [])):
            queue.append(pid)
            if zombies or table[pid][1] not in "ZX":
                pids.append(pid)
    return pids


def learner_pids(root: int) -> dict[int, int]:
    """Return the process id of every rank below `root`, by the names that the launcher gives to its learners."""
    ranks = {}
    for pid in descendants(root):
        with suppress(OSError, ValueError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            if name.startswith("learner-"):
                ranks[int(name.removeprefix("learner-"))] = pid
    return ranks


def shm_entries() -> set[str]:
    """Return the names in /dev/shm that belong to this project or to torch, but for those of `benchmarks.namespaces`."""
    return {name for name in os.listdir(SHM) if name.startswith(("roundelay", "torch_")) and not name.endswith("-shared")}


def owned_by_live_process(name: str) -> bool:
    """Return whether a process that is not ours has the entry open or mapped: it belongs to another run."""
    path = str(SHM / name)
    for pid in _parents():
        with suppress(OSError):
            if path in Path(f"/proc/{pid}/maps").read_text():
                return True
        with suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith(path):
                        return True
    return False


class Job:
    """A training command in a session of its own. Its output goes to FOLDER/out.txt.

    call   runs in a forked child, whose exit code it returns; modules that this process has imported need no import there
    """

    def __init__(self, folder: Path, call: Callable[[], int], env: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.shm_before = shm_entries()
        self.began = time.monotonic()
        self.code: int | None = None
        self.seconds = 0.0
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.setsid()
                _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                out = os.open(folder / "out.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                os.dup2(out, 1)
                os.dup2(out, 2)
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
                os.environ.update(env or {})
                code = call()
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else int(error.code is not None)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                with suppress(OSError):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)

    def poll(self) -> int | None:
        """Reap finished processes; return the exit code of the command, or None while it runs. A signal is negative."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid == self.pid:
                self.code = os.waitstatus_to_exitcode(status)
                self.seconds = time.monotonic() - self.began
        return self.code

    def wait(self, until: float) -> bool:
        """Wait for the end of the command until a time of the monotonic clock. Return whether it has ended."""
        while self.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
        return self.code is not None

    def wait_for(self, condition: Callable[[], Any], until: float, pause_s: float = 0.002) -> bool:
        """Wait for a condition. Return False if the command or the time ends first."""
        while self.poll() is None and time.monotonic() < until:
            if condition():
                return True
            time.sleep(pause_s)
        return False

    def learners(self) -> dict[int, int]:
        return learner_pids(self.pid)

    def finish(self, limit_s: float, grace_s: float = 3.0) -> dict[str, Any]:
        """Wait at most `limit_s` from the start of the command; kill what is left and return what happened."""
        hung = not self.wait(self.began + limit_s)
        stacks = [] if not hung else self._stacks()
        gone = time.monotonic()
        while not hung and self._rest() and time.monotonic() < gone + grace_s:
            self.poll()
            time.sleep(0.02)
        orphans = [] if hung else self._rest()
        rest_s = round(time.monotonic() - gone, 2)
        self.kill()
        leaks = self._leaks()
        if leaks:  # another run on this machine may have made them a moment ago, and not yet mapped them
            time.sleep(1.0)
            leaks = sorted(set(leaks) & set(self._leaks()))
        seconds = self.seconds if not hung else time.monotonic() - self.began
        row: dict[str, Any] = {"code": None if hung else self.code, "seconds": round(seconds, 2), "hung": hung}
        row |= {"orphans": len(orphans), "rest_s": rest_s, "leaks": leaks}
        return {**row, "stacks": stacks} if stacks else row

    def _leaks(self) -> list[str]:
        """Return the entries of /dev/shm that are new and that no live process has open. They are left where they are."""
        return sorted(name for name in shm_entries() - self.shm_before if not owned_by_live_process(name))

    def _rest(self) -> list[int]:
        return [pid for pid in descendants(os.getpid()) if pid not in spared and (pid != self.pid or self.code is None)]

    def _stacks(self) -> list[str]:
        """Return the processes of a command that does not end, with the kernel function each waits in."""
        lines = []
        for pid in descendants(os.getpid()):
            with suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                lines.append(f"{name} {Path(f'/proc/{pid}/wchan').read_text().strip()}")
        return lines

    def kill(self) -> None:
        """Kill all descendants, stopped ones too, and reap them."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            pids = [pid for pid in descendants(os.getpid()) if pid not in spared]
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.poll()
            if not pids:
                return
            time.sleep(0.01)


def preload() -> None:
    """Import everything that a training command needs, so that a forked command starts at once."""
    import torch

    import roundelay.cli.train
    import roundelay.engine.trainer
    import roundelay.launch.local
    import roundelay.launch.threads
    import roundelay.strategies
    import roundelay.testing.tasks  # noqa: F401

    torch.set_num_threads(1)


def cli(*arguments: str) -> Callable[[], int]:
    """Return a call of the command line in this process image."""

    def call() -> int:
        from roundelay.cli.main import main

        sys.argv = ["roundelay", *arguments]
        return int(main(list(arguments)) or 0)

    return call


def command(*arguments: str) -> Callable[[], int]:
    """Return a call that replaces the forked process by a new program."""

    def call() -> int:
        os.execvp(arguments[0], list(arguments))

    return call


# -- what a run has written --------------------------------------------------------------------------------------------


def events_of(run: Path, kind: str = "") -> list[dict[str, Any]]:
    """Return the events of a run, or those of one kind. Unreadable lines and a missing file give nothing."""
    rows = []
    with suppress(OSError):
        for line in (run / "events.jsonl").read_bytes().splitlines():
            with suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and (not kind or row.get("event") == kind):
                    rows.append(row)
    return rows


def model_problem(run: Path, finite: bool = True) -> str:
    """Read every tensor of the run's model. Return what is wrong with it; an empty string if it is complete."""
    from safetensors import SafetensorError, safe_open

    path = run / "model.safetensors"
    if not path.is_file():
        return "no model"
    try:
        with safe_open(str(path), framework="pt") as file:
            names = list(file.keys())
            for name in names:
                tensor = file.get_tensor(name)
                if finite and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                    return f"{name} is not finite"
    except (OSError, SafetensorError, ValueError) as error:
        return f"unreadable: {error}"
    return "" if names else "empty"


def tail(path: Path, lines: int = 6) -> list[str]:
    """Return the last lines of a text file."""
    with suppress(OSError):
        return path.read_text(errors="replace").strip().splitlines()[-lines:]
    return []


def arguments_of(settings: Mapping[str, Any]) -> Sequence[str]:
    return [f"{key}={value}" for key, value in settings.items()]


def environment() -> dict[str, Any]:
    """Return commit, date, machine and command of a result."""
    import platform
    import subprocess

    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "command": " ".join(["python -m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
    }
