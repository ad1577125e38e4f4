"""A directory with prepared files in which the commands of a page are run."""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from command import BIN, LAUNCHER_VARIABLES
from pages import ROOT

from roundelay.cli import main

LIMIT_S = 400.0
SHELL = ("&", ";", "|", "$", "<")


@dataclass
class Outcome:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def all(self) -> str:
        return self.out + self.err


class Sandbox:
    """A working directory that all commands of a page share."""

    def __init__(self, folder: Path, pipeline: Path | None = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copytree(ROOT / "examples", folder / "examples", dirs_exist_ok=True)
        (folder / "docs").symlink_to(ROOT / "docs")
        (folder / "benchmarks" / "results").mkdir(parents=True)
        (folder / "runs").mkdir()
        self.module = types.ModuleType("page")
        if pipeline is not None:
            self._furnish(pipeline)

    def _furnish(self, pipeline: Path) -> None:
        """Add a corpus, a finished run and hypotheses, under the names that pages use."""
        (self.folder / "pipeline").symlink_to(pipeline)
        for name in ("spoken", "mine"):
            shutil.copytree(pipeline / "runs" / "mine", self.folder / "runs" / name)
        for name, part in (("train", "train"), ("test", "test"), ("new", "test")):
            context = self.folder / "data" / name
            context.parent.mkdir(exist_ok=True)
            context.symlink_to(pipeline / "my-speech" / part)
        (self.folder / "my").mkdir()
        (self.folder / "my" / "data_dir").symlink_to(pipeline / "my-speech" / "test")
        for name in ("hyp.txt", "other.txt"):
            shutil.copy(pipeline / "hyp.txt", self.folder / name)

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def run(self, text: str) -> Outcome:
        """Run a command, in this process if possible: a new process takes seconds to import torch."""
        words = shlex.split(text)
        if any(sign in text for sign in SHELL) or words[0] not in ("roundelay", "python"):
            return self._in_a_shell(text)
        into = None
        if ">" in words:
            into = self.folder / words[words.index(">") + 1]
            words = words[: words.index(">")]
        outcome = self._here(words)
        if into is not None:
            into.write_text(outcome.out)
            outcome.out = ""
        return outcome

    def _here(self, words: list[str]) -> Outcome:
        with self._inside() as (out, err):
            try:
                if words[:2] == ["python", "-m"] and words[2].startswith("benchmarks."):
                    sys.path.insert(0, str(ROOT))
                    code = int(importlib.import_module(words[2]).main(words[3:]) or 0)
                elif words[:2] == ["python", "-m"]:
                    sys.path.insert(0, str(ROOT))
                    sys.argv = words[2:]
                    runpy.run_module(words[2], run_name="__main__")
                    code = 0
                elif words[0] == "python":
                    sys.argv = words[1:]
                    sys.path.insert(0, str((self.folder / words[1]).parent))
                    runpy.run_path(words[1], run_name="__main__")
                    code = 0
                else:
                    code = main.main(words[1:])
            except SystemExit as end:
                code = int(end.code or 0)
        return Outcome(code, out.read_text(), err.read_text())

    def python(self, text: str, where: str) -> None:
        """Execute a block of a page. Later blocks see its names."""
        with self._inside():
            sys.modules["page"] = self.module
            exec(compile(text, where, "exec"), self.module.__dict__)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[tuple[Path, Path]]:
        """Change to the directory and redirect output to files, also for child processes.

        On exit, restore the paths, arguments and modules of this process.
        """
        out, err = self.folder / ".out", self.folder / ".err"
        before, path, argv, modules = Path.cwd(), list(sys.path), sys.argv, set(sys.modules)
        os.chdir(self.folder)
        try:
            with open(out, "w") as o, open(err, "w") as e, contextlib.redirect_stdout(o), contextlib.redirect_stderr(e):
                yield out, err
        finally:
            os.chdir(before)
            sys.path[:], sys.argv = path, argv
            for name in set(sys.modules) - modules:
                file = getattr(sys.modules[name], "__file__", None) or ""
                if name == "page" or file.startswith((str(self.folder), str(ROOT / "examples"))):
                    del sys.modules[name]

    def _in_a_shell(self, text: str) -> Outcome:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = str(probe.getsockname()[1])
        env = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
        env |= {"PATH": f"{BIN}:{env['PATH']}", "OMP_NUM_THREADS": "1", "PORT": port}
        if text.endswith("; wait"):  # a bare wait loses the exit codes of background jobs
            text = text.removesuffix("wait") + "code=$?; for job in $(jobs -p); do wait $job || code=$?; done; exit $code"
        job = subprocess.Popen(
            ["bash", "-c", f"set -o pipefail; {text}"], cwd=self.folder, env=env, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            out, err = job.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            out, err = job.communicate()
            return Outcome(-1, out, f"{err}\nnot finished after {LIMIT_S:.0f} s")
        return Outcome(job.returncode, out, err)
