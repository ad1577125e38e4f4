"""Run the commands and code of all pages, and compare their output with the pages.

tests/support/pages.py defines what is a command and what is its output, tests/support/documented.py how long commands are
made short. If a command of a new page fails here, it is wrong or needs an entry there.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from documented import BY_TEST, CANNOT, INSTEAD, shrunk
from pages import PAGES, PROGRAMS, ROOT, Block, Command, is_pattern, read, same
from sandbox import Outcome, Sandbox

from roundelay import config
from roundelay.cli import bench, main
from roundelay.metrics.events import ALWAYS, FIELDS
from roundelay.recipes import config as recipe_settings
from roundelay.simulate import cluster

CORPUS_PAGE = "docs/howto/own-corpus.md"
"""The page whose commands create the corpus and the run that other pages use."""
HINT = (
    "Make it run unchanged, or add it to tests/support/documented.py: INSTEAD (the same, smaller), BY_TEST (another test "
    "runs it) or CANNOT (with the reason). Text that is not a command belongs in a ```text block. See CONTRIBUTING.md."
)
PARSED = [read(path) for path in PAGES]
ALL = [command for page in PARSED for command in page.commands]
BLOCKS = [block for page in PARSED for block in page.blocks]
SCRIPTS = ROOT / "docs" / "_make"


# ------------------------------------------------------------------------------------------------- kinds of commands


@cache
def script(name: str) -> dict[str, Any]:
    """Return the names that a script of docs/_make defines."""
    path = list(sys.path)
    try:
        return runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name=name)
    finally:
        sys.path[:] = path


@cache
def parser_in(module: str) -> Any:
    """Return the parser that the `main` of a module creates."""
    return script("reference")["parser_of"](importlib.import_module(module).main)


def words_of(text: str) -> list[str]:
    words = shlex.split(text.partition(" > ")[0].partition(" & ")[0])
    while words and ("=" in words[0] or words[0] == "sudo"):
        words.pop(0)
    return words


def is_benchmark(text: str) -> bool:
    """Return True for the command line of a benchmark."""
    words = words_of(text)
    return words[:2] in (["roundelay", "bench"], ["roundelay", "calibrate"]) or (
        words[:2] == ["python", "-m"] and words[2:3] != [] and words[2].startswith("benchmarks.")
    )


def parses(text: str) -> bool:
    """Return True if the real parser accepts a command. --help and --version count."""
    words = words_of(text)
    try:
        if words[0] == "python":
            parser_in(words[2]).parse_args(words[3:])
        elif len(words) == 1 or words[1].startswith("-"):
            main.top_parser().parse_args(words[1:])
        elif words[1] not in main.COMMANDS:
            return False
        elif words[1] == "bench" and words[2:3] and words[2] in bench.BENCHES:
            parser_in(bench.BENCHES[words[2]]).parse_args(words[3:])
        elif words[1] in main.FORWARDED:
            parser_in(main.FORWARDED[words[1]]).parse_args(words[2:])
        else:
            main.command_parser(words[1])[0].parse_intermixed_args(words[2:])
    except SystemExit as end:
        return end.code == 0
    return True


def is_mention(text: str) -> bool:
    """Return True for the name of an existing command without required arguments: `roundelay train` in running text."""
    words = words_of(text)
    return words[0] == "roundelay" and len(words) == 2 and words[1] in main.COMMANDS and not parses(text)


def is_run(command: Command) -> bool:
    if command.text in BY_TEST or command.text in CANNOT:
        return False
    return not (command.inline and (is_pattern(command.text) or is_mention(command.text)))


def test_there_is_a_rule_for_every_command() -> None:
    complaints = []
    for c in ALL:
        tables = sum(c.text in table for table in (INSTEAD, BY_TEST, CANNOT))
        program = words_of(c.text)[0] if words_of(c.text) else ""
        if tables > 1:
            complaints.append(f"{c.where}: in two tables of documented.py: {c.text}")
        elif tables == 0 and program not in ("roundelay", "python", "make"):
            complaints.append(f"{c.where}: no rule to run '{program}': {c.text}\n  {HINT}")
        elif tables == 0 and is_run(c) and is_benchmark(c.text) and "--help" not in c.text:
            complaints.append(f"{c.where}: a benchmark takes minutes or hours at full size: {c.text}\n  {HINT}")
    assert not complaints, "\n".join(complaints)


def test_the_parsers_accept_every_command_line() -> None:
    """This includes commands that are run smaller, by another test, or not at all."""
    for c in ALL:
        is_python = words_of(c.text)[0] == "python" and is_benchmark(c.text)
        if is_python or (words_of(c.text)[0] == "roundelay" and not is_mention(c.text)):
            text = c.text.replace("…", "X").replace("COMMAND", "train").replace(".NAME", ".theory")
            assert parses(text), f"{c.where}: the parser does not accept: {c.text}"


def test_the_tables_have_no_unused_entries() -> None:
    documented = {c.text for c in ALL}
    unused = [text for table in (INSTEAD, BY_TEST, CANNOT) for text in table if text not in documented]
    assert not unused, "on no page any more; remove it from tests/support/documented.py:\n" + "\n".join(unused)


@pytest.mark.parametrize("target", sorted(set(BY_TEST.values())))
def test_the_tests_that_are_named_exist(target: str) -> None:
    file, _, name = target.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, target


def test_text_blocks_contain_no_command() -> None:
    for block in BLOCKS:
        assert block.language, f"{block.where}: say what the block is: console, python, toml, bash, json or text"
        if block.language == "text":
            for line in block.text.splitlines():
                first = line.strip().removeprefix("$ ").partition(" ")[0]
                assert first not in PROGRAMS, f"{block.where}: a command belongs in a ```console block: {line}"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in ("toml", "json", "bash")], ids=lambda b: b.where)
def test_files_in_pages_are_valid(block: Block, tmp_path: Path) -> None:
    if block.language == "json":
        json.loads(block.text)
    elif block.language == "bash":
        subprocess.run(["bash", "-n"], input=block.text, text=True, check=True, timeout=60)
    else:
        tree = tomllib.loads(block.text)
        if {"machines", "learner", "link"} & set(tree):
            cluster.from_tree(tree, block.where)
        elif {"source", "kaldi"} & set(tree):
            config.build(recipe_settings.Recipe, {**tree, "folder": tmp_path}, block.where)
        else:
            config.check_partial(config.TrainConfig, tree, block.where)


# ------------------------------------------------------------------------------------------------------- running the pages


class PageRunner:
    """Runs the commands of pages, each page once, in a sandbox of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started = 0
        self.done: dict[str, Sandbox] = {}
        self.shared: dict[str, Outcome] = {}
        """Outcomes of commands that replace several documented ones."""

    def page(self, name: str) -> Sandbox:
        """Run a page, unless that was done, and return its sandbox."""
        if name not in self.done:
            page = next(page for page in PARSED if page.name == name)
            needs_corpus = any(re.search(r"runs/(?:spoken|mine)|run spoken|\bdata/|\bmy/", c.text) for c in page.commands)
            pipeline = self.page(CORPUS_PAGE).folder if needs_corpus and name != CORPUS_PAGE else None
            self.started += 1  # a page that failed is run again in another folder
            box = Sandbox(self.folder / (f"{self.started}-" + re.sub(r"\W", "-", name)), pipeline)
            for item in page.items:
                if isinstance(item, Command):
                    if is_run(item):
                        self.run(box, item)
                elif item.file:
                    box.write(item.file, item.text)
                elif item.language == "python":
                    box.python(item.text, item.where)
            self.done[name] = box
        return self.done[name]

    def run(self, box: Sandbox, c: Command) -> None:
        """Run a command or its replacement, and compare exit code and output."""
        if words_of(c.text)[0] == "make":
            return self.make(c)
        text = INSTEAD.get(c.text) or shrunk(c.text)
        once = c.text in INSTEAD and (
            list(INSTEAD.values()).count(text) > 1 or is_benchmark(text) or text.split()[1] in ("plan", "simulate")
        )
        outcome = self.shared.get(text) or box.run(text)
        replaced = "" if text == c.text else f"\nrun as: {text}"
        output = f"\n--- stdout\n{outcome.out}\n--- stderr\n{outcome.err[-3000:]}"
        assert outcome.code == c.exit, (
            f"{c.where}: $ {c.text}{replaced}\nexit code {outcome.code}, not {c.exit}{output}\n{HINT}"
        )
        if c.output:
            fits = same(c.output, outcome.out, c.measured) or same(c.output, outcome.all, c.measured)
            assert fits, f"{c.where}: $ {c.text}{replaced}\nprints other output than the page shows{output}"
        if once:
            self.shared[text] = outcome
        return None

    def make(self, c: Command) -> None:
        """Check that the target exists, without running it."""
        result = subprocess.run(
            ["make", "-n", "-C", str(ROOT), *shlex.split(c.text)[1:]], capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 0, f"{c.where}: {result.stderr}"


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> PageRunner:
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    return PageRunner(tmp_path_factory.mktemp("pages"))


WITH_COMMANDS = [
    page.name for page in PARSED if any(map(is_run, page.commands)) or any(b.language == "python" for b in page.blocks)
]


@pytest.mark.dist
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_the_commands_of_a_page_run(name: str, runner: PageRunner) -> None:
    runner.page(name)


def test_a_page_that_failed_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executed = []

    def fail(self: PageRunner, box: Sandbox, c: Command) -> None:
        executed.append(c)
        raise AssertionError(c.where)

    monkeypatch.setattr(PageRunner, "run", fail)
    runner = PageRunner(tmp_path)
    for tries in (1, 2):
        with pytest.raises(AssertionError):
            runner.page("docs/benchmarks.md")
        assert len(executed) == tries


def test_runs_write_only_documented_events(runner: PageRunner) -> None:
    for name in ("docs/howto/resume.md", "docs/howto/uneven-machines.md"):
        box = runner.page(name)
        files = sorted(box.folder.glob("runs/*/events.jsonl"))
        assert files
        for file in files:
            for event in map(json.loads, file.read_text().splitlines()):
                unknown = set(event) - set(ALWAYS) - set(FIELDS[event["event"]])
                assert not unknown, f"metrics.events.FIELDS lacks {unknown} of {event['event']}"


# ------------------------------------------------------------------------------------------------- special cases


@pytest.mark.dist
@pytest.mark.timeout(600)
def test_the_slurm_script_on_one_machine(tmp_path: Path) -> None:
    """Run the script of slurm.md with fake srun and scontrol: quoting, variables, the torchrun line."""
    batch = next(b.text for b in BLOCKS if b.page == "docs/howto/slurm.md" and b.file == "train.sbatch")
    small = "progress=none task_options.samples=256 task_options.held_out=64 epochs=1 batch=16"
    batch = batch.replace("LEARNERS=8 ", "LEARNERS=2 ").replace("progress=plain", small)
    box = Sandbox(tmp_path / "slurm")
    box.write("train.sbatch", batch)
    box.write("bin/scontrol", "#!/bin/bash\necho 127.0.0.1\n")
    box.write("bin/srun", '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nSLURM_NODEID=0 exec "$@"\n')
    for name in ("scontrol", "srun"):
        (box.folder / "bin" / name).chmod(0o755)
    variables = (
        f"SLURM_NNODES=1 SLURM_JOB_NAME=try SLURM_JOB_ID=$((PORT - 20000)) SLURM_JOB_NODELIST=x SLURM_SUBMIT_DIR={box.folder}"
    )
    outcome = box.run(f"PATH=$PWD/bin:$PATH {variables} bash train.sbatch")
    assert outcome.code == 0, outcome.all
    assert (box.folder / "runs" / "try" / "model.safetensors").exists()


@pytest.mark.parametrize("page", ["README.md", "docs/demo.md"])
def test_pages_show_the_table_of_the_demo(page: str) -> None:
    from roundelay.recipes import demo

    row = {"seconds": 1.0, "samples_per_s": 1.0, "logprob": -1.0, "wer": 1.0, "low": 1.0, "high": 1.0}
    pair = {"from": "sync", "to": "adpsgd", "difference": 0.0, "low": 0.0, "high": 0.0, "count": 80, "units": "speakers"}
    lines = demo.table({"rows": [{"strategy": name, **row} for name in demo.STRATEGIES], "paired": pair}).splitlines()
    text = " ".join((ROOT / page).read_text().split())
    for line in (lines[0], *(line.split("(")[0] for line in lines if line.startswith("logprob"))):
        assert " ".join(line.split()) in text


# ------------------------------------------------------------------------------------------------- generated pages

AGAIN = "run make docs"


@pytest.mark.parametrize("name", script("reference")["PAGES"])
def test_reference_pages_are_up_to_date(name: str) -> None:
    assert (ROOT / "docs" / "reference" / f"{name}.md").read_text() == script("reference")["render"](name), AGAIN


@pytest.mark.parametrize("name", script("timelines")["PICTURES"])
def test_pictures_are_up_to_date(name: str) -> None:
    draw: Callable[[], Any] = script("timelines")["PICTURES"][name]
    assert (ROOT / "docs" / "pictures" / f"{name}.svg").read_text() == draw().svg(), AGAIN
    assert f"../pictures/{name}.svg" in (ROOT / "docs" / "strategies" / f"{name}.md").read_text()


@pytest.mark.parametrize("name", ["stragglers", "batches"])
def test_pictures_of_virtual_time_are_drawn_from_their_records(name: str) -> None:
    assert (ROOT / "docs" / "pictures" / f"{name}.svg").read_text() == script("virtual")["picture_file"](name), AGAIN
    assert f"pictures/{name}.svg" in (ROOT / "docs" / "simulated.md").read_text()


def test_the_strip_chart_is_drawn_from_what_was_recorded() -> None:
    recorded = json.loads((ROOT / "docs" / "pictures" / "straggler.json").read_text())
    assert (ROOT / "docs" / "pictures" / "straggler.svg").read_text() == script("strip")["draw"](recorded).svg(), AGAIN


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "strategies").glob("*.md")), ids=lambda p: p.stem)
def test_measurements_of_strategies_are_the_recorded_ones(page: Path) -> None:
    assert page.read_text() == script("measured")["rewritten"](page.stem), AGAIN
