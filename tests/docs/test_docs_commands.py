"""Everything the documentation tells people to type is typed here, and what it shows as output is compared.

How a page says what is a command and what is its output: tests/support/pages.py. How long ones are made short:
tests/support/documented.py. A command of a new page that fails here is either wrong, or needs a line there.
"""

from __future__ import annotations

import ast
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
from roundelay.cli import main
from roundelay.metrics.events import ALWAYS, FIELDS
from roundelay.recipes import config as recipe_settings
from roundelay.simulate import cluster

ROAD = "docs/howto/own-corpus.md"
HOW = (
    "Run it as it stands, or give it a line in tests/support/documented.py: INSTEAD (the same, smaller), BY_TEST (another test "
    "runs it) or CANNOT (with the reason). What is no command belongs in a ```text block. See CONTRIBUTING.md, Documentation."
)
TAKEN = [read(path) for path in PAGES]
ALL = [command for page in TAKEN for command in page.commands]
BLOCKS = [block for page in TAKEN for block in page.blocks]
MADE = Path(ROOT / "docs" / "_make")


# ------------------------------------------------------------------------------------------------- what kind of thing it is


@cache
def bench_parser(which: str) -> Any:
    return made("reference")["bench_parser"](__import__(main.BENCHES[which], fromlist=["main"]).main)


@cache
def made(name: str) -> dict[str, Any]:
    """The names of one of the scripts that make pages and pictures."""
    path = list(sys.path)
    try:
        return runpy.run_path(str(MADE / f"{name}.py"), run_name=name)
    finally:
        sys.path[:] = path


def words_of(text: str) -> list[str]:
    words = shlex.split(text.partition(" > ")[0].partition(" & ")[0])
    while words and ("=" in words[0] or words[0] == "sudo"):
        words.pop(0)
    return words


def parses(text: str) -> bool:
    """Whether the real parser takes it; --help and --version count."""
    words = words_of(text)[1:]
    try:
        args = main.parser().parse_args(words)
        if args.command == "bench":
            bench_parser(args.which).parse_args(args.rest)
    except SystemExit as end:
        return end.code == 0
    return True


def is_mention(text: str) -> bool:
    """`roundelay train` in running text: the name of a command, which must exist, not a command line."""
    words = words_of(text)
    chosen = next(a for a in main.parser()._actions if hasattr(a, "choices") and a.choices)
    return words[0] == "roundelay" and len(words) == 2 and words[1] in chosen.choices and not parses(text)


def is_run(command: Command) -> bool:
    if command.text in BY_TEST or command.text in CANNOT:
        return False
    return not (command.inline and (is_pattern(command.text) or is_mention(command.text)))


def test_every_command_is_one_we_know() -> None:
    complaints = []
    for c in ALL:
        tables = sum(c.text in table for table in (INSTEAD, BY_TEST, CANNOT))
        program = words_of(c.text)[0] if words_of(c.text) else ""
        if tables > 1:
            complaints.append(f"{c.where}: in two tables of documented.py: {c.text}")
        elif tables == 0 and program not in ("roundelay", "python", "make"):
            complaints.append(f"{c.where}: nothing here knows how to run '{program}': {c.text}\n  {HOW}")
        elif tables == 0 and is_run(c) and words_of(c.text)[1:2] == ["bench"] and "--help" not in c.text:
            complaints.append(f"{c.where}: a benchmark takes minutes or hours as it stands: {c.text}\n  {HOW}")
    assert not complaints, "\n".join(complaints)


def test_every_command_line_is_taken_by_the_parser() -> None:
    """Also those that are run smaller, by another test, or not at all: their options exist."""
    for c in ALL:
        if words_of(c.text)[0] == "roundelay" and not is_mention(c.text):
            filled = c.text.replace("…", "X").replace("COMMAND", "train").replace("WHICH", "throughput")
            assert parses(filled), f"{c.where}: roundelay does not take this: {c.text}"


def test_the_tables_hold_nothing_that_no_page_says() -> None:
    said = {c.text for c in ALL}
    unused = [text for table in (INSTEAD, BY_TEST, CANNOT) for text in table if text not in said]
    assert not unused, "no page says this any more; remove it from tests/support/documented.py:\n" + "\n".join(unused)


@pytest.mark.parametrize("target", sorted(set(BY_TEST.values())))
def test_the_tests_that_are_named_exist(target: str) -> None:
    file, _, name = target.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, target


def test_blocks_for_people_hold_no_command() -> None:
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
            recipe_settings.build(tree, tmp_path / "recipe.toml")
        else:
            config.check(tree, block.where)


# ------------------------------------------------------------------------------------------------------- running the pages


class Reader:
    """Somebody who types in every page, once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.begun = 0
        self.done: dict[str, Sandbox] = {}
        self.shared: dict[str, Outcome] = {}
        """What stands in for several commands is run once."""

    def page(self, name: str) -> Sandbox:
        if name not in self.done:
            taken = next(page for page in TAKEN if page.name == name)
            speaks = any(re.search(r"(?:runs/(?:spoken|mine)|recipes/spoken|\bdata/|\bmy/)", c.text) for c in taken.commands)
            road = self.page(ROAD).folder if speaks and name != ROAD else None
            self.begun += 1  # a page that failed is typed anew, in a folder of its own
            box = Sandbox(self.folder / (f"{self.begun}-" + re.sub(r"\W", "-", name)), road)
            for item in taken.items:
                if isinstance(item, Command):
                    if is_run(item):
                        self.type(box, item)
                elif item.file:
                    box.write(item.file, item.text)
                elif item.language == "python":
                    box.python(item.text, item.where)
            self.done[name] = box
        return self.done[name]

    def type(self, box: Sandbox, c: Command) -> None:
        if words_of(c.text)[0] == "make":
            return self.make(c)
        text = INSTEAD.get(c.text) or shrunk(c.text)
        once = c.text in INSTEAD and (
            list(INSTEAD.values()).count(text) > 1 or text.split()[1] in ("bench", "plan", "simulate")
        )
        outcome = self.shared.get(text) or box.run(text)
        ran = "" if text == c.text else f"\nrun as: {text}"
        told = f"\n--- stdout\n{outcome.out}\n--- stderr\n{outcome.err[-3000:]}"
        assert outcome.code == c.exit, f"{c.where}: $ {c.text}{ran}\nended with {outcome.code}, not {c.exit}{told}\n{HOW}"
        if c.output:
            fits = same(c.output, outcome.out, c.measured) or same(c.output, outcome.all, c.measured)
            assert fits, f"{c.where}: $ {c.text}{ran}\nprints something else than the page says{told}"
        if once:
            self.shared[text] = outcome
        return None

    def make(self, c: Command) -> None:
        """The target exists; what continuous integration runs anyway is not run here."""
        shown = subprocess.run(
            ["make", "-n", "-C", str(ROOT), *shlex.split(c.text)[1:]], capture_output=True, text=True, timeout=60
        )
        assert shown.returncode == 0, f"{c.where}: {shown.stderr}"


@pytest.fixture(scope="session")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    return Reader(tmp_path_factory.mktemp("pages"))


WITH_SOMETHING_TO_RUN = [
    page.name for page in TAKEN if any(map(is_run, page.commands)) or any(b.language == "python" for b in page.blocks)
]


@pytest.mark.dist
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", WITH_SOMETHING_TO_RUN)
def test_what_a_page_says_can_be_typed(name: str, reader: Reader) -> None:
    reader.page(name)


def test_a_page_that_failed_fails_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of real processes are tried twice: the second try must type the page, not find it read."""
    typed = []

    def fail(self: Reader, box: Sandbox, c: Command) -> None:
        typed.append(c)
        raise AssertionError(c.where)

    monkeypatch.setattr(Reader, "type", fail)
    reader = Reader(tmp_path)
    for tries in (1, 2):
        with pytest.raises(AssertionError):
            reader.page("docs/benchmarks.md")
        assert len(typed) == tries


def test_real_runs_write_the_documented_events_and_no_other(reader: Reader) -> None:
    for name in ("docs/howto/resume.md", "docs/howto/uneven-machines.md"):
        box = reader.page(name)
        files = sorted(box.folder.glob("runs/*/events.jsonl"))
        assert files
        for file in files:
            for event in map(json.loads, file.read_text().splitlines()):
                unknown = set(event) - set(ALWAYS) - set(FIELDS[event["event"]])
                assert not unknown, f"core.events.FIELDS does not tell of {unknown} in {event['event']}"


# ---------------------------------------------------------------------------------------- things that need more than a line


@pytest.mark.dist
@pytest.mark.timeout(600)
def test_the_slurm_script_on_one_machine(tmp_path: Path) -> None:
    """The script of slurm.md under a pretended srun and scontrol: its quoting, its variables, its torchrun line."""
    script = next(b.text for b in BLOCKS if b.page == "docs/howto/slurm.md" and b.file == "train.sbatch")
    small = "progress=none task_options.samples=256 task_options.held_out=64 epochs=1 batch=16"
    script = script.replace("LEARNERS=8 ", "LEARNERS=2 ").replace("progress=plain", small)
    box = Sandbox(tmp_path / "slurm")
    box.write("train.sbatch", script)
    box.write("bin/scontrol", "#!/bin/bash\necho 127.0.0.1\n")
    box.write("bin/srun", '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nSLURM_NODEID=0 exec "$@"\n')
    for name in ("scontrol", "srun"):
        (box.folder / "bin" / name).chmod(0o755)
    variables = (
        f"SLURM_NNODES=1 SLURM_JOB_NAME=try SLURM_JOB_ID=$((PORT - 20000)) SLURM_JOB_NODELIST=x SLURM_SUBMIT_DIR={box.folder}"
    )
    ended = box.run(f"PATH=$PWD/bin:$PATH {variables} bash train.sbatch")
    assert ended.code == 0, ended.all
    assert (box.folder / "runs" / "try" / "model.safetensors").exists()


@pytest.mark.parametrize("page", ["README.md", "docs/demo.md"])
def test_the_demos_table_has_the_columns_the_pages_show(page: str) -> None:
    """The demo itself: tests/recipes/test_demo.py."""
    from roundelay.recipes import demo

    row = {"seconds": 1.0, "samples_per_s": 1.0, "logprob": -1.0, "wer": 1.0, "low": 1.0, "high": 1.0}
    pair = {"from": "sync", "to": "adpsgd", "difference": 0.0, "low": 0.0, "high": 0.0, "count": 80, "units": "speakers"}
    shown = demo.table({"rows": [{"strategy": name, **row} for name in demo.STRATEGIES], "paired": pair}).splitlines()
    text = " ".join((ROOT / page).read_text().split())
    for line in (shown[0], *(line.split("(")[0] for line in shown if line.startswith("logprob"))):
        assert " ".join(line.split()) in text


# -------------------------------------------------------------------------------------------------- pages made from the code

AGAIN = "make docs writes it anew"


@pytest.mark.parametrize("name", made("reference")["PAGES"])
def test_reference_pages_are_what_the_code_says(name: str) -> None:
    assert (ROOT / "docs" / "reference" / f"{name}.md").read_text() == made("reference")["render"](name), AGAIN


@pytest.mark.parametrize("name", made("timelines")["PICTURES"])
def test_pictures_are_what_their_script_draws(name: str) -> None:
    draw: Callable[[], Any] = made("timelines")["PICTURES"][name]
    assert (ROOT / "docs" / "pictures" / f"{name}.svg").read_text() == draw().svg(), AGAIN
    assert f"../pictures/{name}.svg" in (ROOT / "docs" / "strategies" / f"{name}.md").read_text()


@pytest.mark.parametrize("name", ["stragglers", "batches"])
def test_pictures_of_virtual_time_are_drawn_from_their_records(name: str) -> None:
    assert (ROOT / "docs" / "pictures" / f"{name}.svg").read_text() == made("virtual")["picture_file"](name), AGAIN
    assert f"pictures/{name}.svg" in (ROOT / "docs" / "simulated.md").read_text()


def test_the_strip_chart_is_drawn_from_what_was_recorded() -> None:
    recorded = json.loads((ROOT / "docs" / "pictures" / "straggler.json").read_text())
    assert (ROOT / "docs" / "pictures" / "straggler.svg").read_text() == made("strip")["draw"](recorded).svg(), AGAIN


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "strategies").glob("*.md")), ids=lambda p: p.stem)
def test_figures_of_strategies_are_the_recorded_ones(page: Path) -> None:
    assert page.read_text() == made("measured")["rewritten"](page.stem), AGAIN
