"""Run the installed command as users do, always with a time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

BIN = Path(sys.executable).parent
ROUNDELAY = str(BIN / "roundelay")
TORCHRUN = str(BIN / "torchrun")
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Finished:
    """Exit code, output and duration of a command that has ended."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def expect(self, code: int) -> Finished:
        """Assert the exit code, and that no traceback was printed."""
        assert self.code == code, f"exit code {self.code} instead of {code}\n{self.err}\n{self.out}"
        assert "Traceback" not in self.err, self.err
        return self


class Job:
    """A running command. Its output goes to files, so that no pipe can fill up."""

    def __init__(self, command: list[str], folder: Path, name: str, env: dict[str, str]) -> None:
        self.folder, self.name = folder, name
        base = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
        self.began = time.monotonic()
        with open(folder / f"{name}.out", "w") as out, open(folder / f"{name}.err", "w") as err:
            self.process = subprocess.Popen(
                command, cwd=folder, stdout=out, stderr=err, start_new_session=True, env={**base, **env}
            )

    @property
    def err(self) -> str:
        return (self.folder / f"{self.name}.err").read_text(errors="replace")

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> None:
        """Poll until `condition` holds. Fail if the job ends first or the time limit expires."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the job ended before {what}\n{self.err}"
            assert time.monotonic() < deadline, f"no {what} in {timeout_s:.0f} s\n{self.err}"
            time.sleep(0.01)

    def learners(self) -> dict[int, int]:
        """Return the process id of every rank that this command has started."""
        processes = {}
        for pid in descendants(self.process.pid):
            with suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                rank = next((v for v in variables if v.startswith((b"RANK=", b"OMPI_COMM_WORLD_RANK="))), None)
                if name.startswith("learner-"):
                    processes[int(name.removeprefix("learner-"))] = pid
                elif rank is not None:
                    processes[int(rank.partition(b"=")[2])] = pid
        return processes

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, timeout_s: float = 60.0) -> Finished:
        """Wait for the end; fail and kill everything if it does not come in time."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            err = self.err
            self.kill_everything()
            raise AssertionError(f"not finished within {timeout_s:.0f} s\n{err}") from None
        out = (self.folder / f"{self.name}.out").read_text()
        return Finished(code, out, self.err, time.monotonic() - self.began)

    def kill_everything(self) -> None:
        """Send SIGKILL to the command and all its learners, as if the machine failed."""
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


class Jobs:
    """Start commands; a context manager that kills what is still running at its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trace = folder / "trace"
        self.trace.mkdir(exist_ok=True)
        self._jobs: list[Job] = []

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for job in self._jobs:
            job.kill_everything()

    def start(self, *command: str, **env: str) -> Job:
        job = Job(list(command), self.folder, f"job-{len(self._jobs)}", env)
        self._jobs.append(job)
        return job

    def run(self, *args: str, timeout_s: float = 60.0, **env: str) -> Finished:
        """Run `roundelay …` to its end."""
        return self.start(ROUNDELAY, *args, **env).end(timeout_s)

    def task(self, **options: Any) -> str:
        """Write a settings file for the task Dots and return its path."""
        options = {"trace": str(self.trace), **options}
        lines = ['task = "tasks:Dots"', 'progress = "none"', "batch = 4", "lr = 0.05", "log_every_s = 0.05"]
        # no checkpoints by default: evaluating them computes gradients, which tests that count gradients must not see
        lines.append("checkpoint_every_epochs = 100")
        lines += ["[task_options]", *(f"{key} = {json.dumps(value)}" for key, value in options.items())]
        path = self.folder / "dots.toml"
        path.write_text("\n".join(lines) + "\n")
        (self.folder / "tasks.py").write_text(Path(__file__).with_name("tasks.py").read_text())
        return str(path)

    def train(self, *overrides: str, run: str = "run", **options: Any) -> Job:
        """Start `roundelay train` on the task Dots, in its own run directory."""
        return self.start(ROUNDELAY, "train", self.task(**options), f"run={run}", *overrides)

    # -- results of a run -----------------------------------------------------------------------------------------

    def held(self) -> set[int]:
        """Return the ranks that wait at the gradient the task is to hold at."""
        return {int(p.name.removeprefix("held-")) for p in self.trace.glob("held-*")}

    def release(self) -> None:
        """Let the waiting ranks continue."""
        (self.trace / "go").write_text("")

    def batches(self) -> dict[int, list[list[int]]]:
        """Return the samples of every gradient, by rank, in order."""
        batches: dict[int, list[list[int]]] = {}
        for path in sorted(self.trace.glob("samples-*.txt"), key=lambda p: p.stat().st_mtime_ns):  # oldest run first
            lines = path.read_text().splitlines()
            batches.setdefault(int(path.name.split("-")[1]), []).extend([int(p) for p in line.split()] for line in lines)
        return batches

    def counts(self) -> Counter[int]:
        """Return how many gradients were computed on each sample."""
        return Counter(p for batches in self.batches().values() for batch in batches for p in batch)

    def events(self, run: str = "run", kind: str = "") -> list[dict[str, Any]]:
        path = self.folder / run / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [e for e in map(json.loads, lines) if not kind or e["event"] == kind]

    def checkpoints(self, run: str = "run") -> list[str]:
        return sorted(p.name for p in (self.folder / run / "ckpt").glob("samples-*"))

    def model(self, run: str = "run") -> bytes:
        return (self.folder / run / "model.safetensors").read_bytes()


def descendants(pid: int) -> Iterator[int]:
    """Return all descendants of a process that are still running."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    parents.setdefault(int(fields[1]), []).append(int(entry.name))
    tree = [pid]
    for parent in tree:
        tree += parents.get(parent, [])
    return iter(tree[1:])


def gone(pid: int) -> bool:
    """Return whether a process has ended; a zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
