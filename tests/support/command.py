"""The installed command, run as users run it, with a time limit on everything."""

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
    """A command that has ended."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def expect(self, code: int) -> Finished:
        """Ended with this exit code; whatever the code, a user's mistake never shows a traceback."""
        assert self.code == code, f"exit code {self.code} instead of {code}\n{self.err}\n{self.out}"
        assert "Traceback" not in self.err, self.err
        return self


class Job:
    """A command under way, its output in files so that no pipe can fill up."""

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
        """Waits for something to happen; the job's end before it, or the time limit, is a failure."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the job ended before {what}\n{self.err}"
            assert time.monotonic() < deadline, f"no {what} in {timeout_s:.0f} s\n{self.err}"
            time.sleep(0.01)

    def learners(self) -> dict[int, int]:
        """Process of every rank that this command has started."""
        found = {}
        for pid in descendants(self.process.pid):
            with suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                rank = next((v for v in variables if v.startswith((b"RANK=", b"OMPI_COMM_WORLD_RANK="))), None)
                if name.startswith("learner-"):
                    found[int(name.removeprefix("learner-"))] = pid
                elif rank is not None:
                    found[int(rank.partition(b"=")[2])] = pid
        return found

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, timeout_s: float = 60.0) -> Finished:
        """Waits for the end; a hang is a failure."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            err = self.err
            self.kill_everything()
            raise AssertionError(f"no end in {timeout_s:.0f} s\n{err}") from None
        out = (self.folder / f"{self.name}.out").read_text()
        return Finished(code, out, self.err, time.monotonic() - self.began)

    def kill_everything(self) -> None:
        """SIGKILL for the command and all its learners, as when a machine goes down."""
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


class Jobs:
    """Starts commands; a context manager that leaves nothing running."""

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
        """`roundelay …`, to its end."""
        return self.start(ROUNDELAY, *args, **env).end(timeout_s)

    def task(self, **options: Any) -> str:
        """Writes a settings file for the task Dots; returns its path."""
        options = {"trace": str(self.trace), **options}
        lines = ['task = "tasks:Dots"', 'progress = "none"', "batch = 4", "lr = 0.05", "log_every_s = 0.05"]
        lines.append("checkpoint_every_epochs = 100")  # judging a checkpoint takes gradients too, which tests that count must not see
        lines += ["[task_options]", *(f"{key} = {json.dumps(value)}" for key, value in options.items())]
        path = self.folder / "dots.toml"
        path.write_text("\n".join(lines) + "\n")
        (self.folder / "tasks.py").write_text(Path(__file__).with_name("tasks.py").read_text())
        return str(path)

    def train(self, *overrides: str, run: str = "run", **options: Any) -> Job:
        """`roundelay train` on the task Dots, in its own run directory."""
        return self.start(ROUNDELAY, "train", self.task(**options), f"run={run}", *overrides)

    # -- what a run has left behind --------------------------------------------------------------------------------

    def held(self) -> set[int]:
        """Ranks that have stopped where the task was told to."""
        return {int(p.name.removeprefix("held-")) for p in self.trace.glob("held-*")}

    def release(self) -> None:
        """Those who wait may go on."""
        (self.trace / "go").write_text("")

    def batches(self) -> dict[int, list[list[int]]]:
        """The samples of every gradient, by rank, in order."""
        found: dict[int, list[list[int]]] = {}
        for path in sorted(self.trace.glob("samples-*.txt"), key=lambda p: p.stat().st_mtime_ns):  # runs one after another
            lines = path.read_text().splitlines()
            found.setdefault(int(path.name.split("-")[1]), []).extend([int(p) for p in line.split()] for line in lines)
        return found

    def counts(self) -> Counter[int]:
        """How often a gradient was computed on each sample."""
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
    """All processes below this one that are still there."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for parent in found:
        found += parents.get(parent, [])
    return iter(found[1:])


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
