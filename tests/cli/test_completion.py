"""Shell completion, asked in the real shells."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from roundelay.cli import main

ASK_BASH = """
source {script}
COMP_WORDS=({words}); COMP_CWORD={number}
_roundelay
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("completion")
    found = {}
    for shell in ("bash", "zsh", "fish"):
        with pytest.MonkeyPatch.context() as patch:
            written = folder / f"roundelay.{shell}"
            with written.open("w") as out:
                patch.setattr("sys.stdout", out)
                assert main.main(["completion", shell]) == 0
        found[shell] = written
    return found


def asked(script: Path, *words: str) -> list[str]:
    """What bash would offer for the last word."""
    quoted = " ".join(f"'{w}'" for w in words)
    text = ASK_BASH.format(script=script, words=quoted, number=len(words) - 1)
    ended = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert ended.stderr == ""
    return ended.stdout.split()


def test_bash_completes_commands_options_and_settings(scripts: dict[str, Path]) -> None:
    script = scripts["bash"]
    assert {"train", "run", "demo", "check", "list", "bench", "decode", "report", "compare"} <= set(
        asked(script, "roundelay", "")
    )
    assert asked(script, "roundelay", "de") == ["demo", "decode"]
    assert asked(script, "roundelay", "list", "st") == ["strategies", "stages"]
    assert "--json" in asked(script, "roundelay", "train", "--")
    assert asked(script, "roundelay", "train", "f.toml", "strat") == ["strategy=", "strategy_options="]
    assert asked(script, "roundelay", "train", "f.toml", "strategy", "=", "adp") == ["adpsgd"]
    assert set(asked(script, "roundelay", "train", "f.toml", "progress", "=")) == {"auto", "rich", "plain", "none"}
    assert asked(script, "roundelay", "run", "recipes/x", "train.lear") == ["train.learners="]
    assert "random_ring" in asked(script, "roundelay", "run", "recipes/x", "train.topology", "=", "r")
    assert asked(script, "roundelay", "bench", "thr") == ["throughput"]


def test_bash_completes_files_where_nothing_else_fits(scripts: dict[str, Path]) -> None:
    assert str(scripts["bash"]) in asked(scripts["bash"], "roundelay", "train", str(scripts["bash"])[:-4])


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_can_read_theirs(shell: str, scripts: dict[str, Path]) -> None:
    text = scripts[shell].read_text()
    assert "strategy=" in text
    assert "adpsgd" in text
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    ended = subprocess.run([shell, "-n", str(scripts[shell])], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_fish_completes(scripts: dict[str, Path]) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")

    def ask(line: str) -> list[str]:
        command = f"source {scripts['fish']}; complete -C '{line}'"
        ended = subprocess.run(["fish", "-N", "-c", command], capture_output=True, text=True, timeout=60, check=False)
        return [row.split("\t")[0] for row in ended.stdout.splitlines()]

    assert set(ask("roundelay de")) == {"demo", "decode"}
    assert "strategy=adpsgd" in ask("roundelay train f.toml strategy=ad")
    assert "--json" in ask("roundelay list --js")
