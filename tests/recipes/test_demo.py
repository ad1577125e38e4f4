"""A small demo: it continues after interrupts in several stages, and prints its table at the end."""

from __future__ import annotations

import json
import os
import re
import signal
import wave
from pathlib import Path

import pytest
from command import ROUNDELAY, Job, Jobs

from roundelay.cli import main
from roundelay.metrics.events import read_events
from roundelay.recipes import demo

pytest.importorskip("espeakng_loader", reason="the demo needs the extra speech")

TINY = [
    "source.options.train_speakers=5", "source.options.train_utterances=30", "source.options.dev_speakers=2",
    "source.options.dev_utterances=4", "source.options.test_speakers=3", "source.options.test_utterances=6",
    "source.options.lm_sentences=300", "mono.passes=6", "mono.gaussians=2", "tri.passes=4", "tri.leaves=40", "tri.gaussians=2",
    "network.model=tiny", "network.hidden=16", "network.layers=1", "train.epochs=2.0", "train.batch=4", "scales=[0.1]",
    "train.log_every_s=0.1",
]  # fmt: skip
PATIENCE_S = 800.0


def start(jobs: Jobs) -> Job:
    return jobs.start(ROUNDELAY, "demo", "--json", "--jobs", "2", *TINY, OMP_NUM_THREADS="1")


def interrupt(job: Job) -> None:
    """Send SIGINT to all processes of the group, as a terminal does."""
    os.killpg(job.process.pid, signal.SIGINT)
    ended = job.end(PATIENCE_S / 4).expect(130)
    assert "completed work is kept" in ended.err
    assert "continue with: roundelay demo source.options.train_speakers=5" in ended.err
    assert "Exception" not in ended.err
    assert ended.out == ""


def steps(folder: Path) -> int:
    path = folder / "network" / "events.jsonl"
    return sum(e["samples"] for e in read_events(path) if e["event"] == "steps") if path.exists() else 0


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict, str]:
    """Run the demo with an interrupt in each of five stages. Return its directory, its JSON, and its stderr."""
    folder = tmp_path_factory.mktemp("demo")
    with Jobs(folder) as jobs:
        for message in ("1. Synthesize", "3. Train hidden Markov"):
            job = start(jobs)
            job.until(lambda job=job, message=message: message in job.err, message, PATIENCE_S / 4)
            interrupt(job)
        job = start(jobs)
        job.until(lambda: steps(folder / "demo" / "adpsgd") > 0, "a step", PATIENCE_S / 2)
        interrupt(job)
        for message in ("6. Train the same", "7. Decode"):
            job = start(jobs)
            job.until(lambda job=job, message=message: message in job.err, message, PATIENCE_S / 2)
            interrupt(job)
        ended = start(jobs).end(PATIENCE_S / 2).expect(0)
    return folder / "demo", json.loads(ended.out.splitlines()[-1]), ended.err


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(PATIENCE_S + 60)
def test_after_interrupts_the_same_command_continues_to_the_table(done: tuple[Path, dict, str]) -> None:
    folder, result, stderr = done
    assert [row["strategy"] for row in result["rows"]] == ["adpsgd", "sync"]
    for row in result["rows"]:
        assert {"strategy", "seconds", "samples_per_s", "logprob", "wer", "low", "high"} <= set(row)
        assert row["low"] <= row["wer"] <= row["high"]
        assert row["seconds"] > 0
        assert row["logprob"] < 0
        assert row["samples_per_s"] == pytest.approx(row["samples"] / row["seconds"], rel=0.01)
    assert result["rows"][0]["samples"] == result["rows"][1]["samples"], "no sample was lost or repeated by an interrupt"
    difference = result["rows"][0]["wer"] - result["rows"][1]["wer"]
    assert result["paired"]["difference"] == pytest.approx(difference, abs=0.01)
    assert result["paired"]["low"] <= result["paired"]["difference"] <= result["paired"]["high"]
    assert Path(result["report"]).name == "report.html"
    assert (folder / "report.html").stat().st_size > 0
    for stage in ("data", "features", "mono", "tri", "align", "graph", "adpsgd", "sync"):
        assert f"{stage}: done before" in stderr
    assert len(re.findall(r"^  roundelay ", stderr, re.MULTILINE)) == 3, "three suggested commands"


@pytest.mark.timeout(PATIENCE_S + 60)
def test_the_demo_copies_a_recording_and_its_transcript(done: tuple[Path, dict, str]) -> None:
    folder, _, stderr = done
    with wave.open(str(folder / "sample.wav")) as sound:
        assert sound.getframerate() == 8000
        assert sound.getnframes() > 4000
    words = (folder / "sample.txt").read_text().strip().lower()
    assert f'"{words}"' in stderr
    assert str(demo.SAMPLE) in stderr


@pytest.mark.timeout(PATIENCE_S + 60)
def test_the_demo_leaves_a_run_that_decodes(done: tuple[Path, dict, str], capsys: pytest.CaptureFixture[str]) -> None:
    folder, result, _ = done
    assert main.main(["decode", str(folder / "sync"), "--data", str(folder / "data" / "test"), "--jobs", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["wer"] == result["rows"][1]["wer"]


def test_the_table_fits_60_columns() -> None:
    row = {"seconds": 1234.5, "samples_per_s": 12345.6, "logprob": -12.3456, "wer": 12.34, "low": 10.12, "high": 14.56}
    pair = {"from": "sync", "to": "adpsgd", "difference": -0.5, "low": -10.25, "high": 10.25, "count": 80, "units": "speakers"}
    text = demo.table({"rows": [{"strategy": name, **row} for name in demo.STRATEGIES], "paired": pair})
    assert max(map(len, text.splitlines())) <= 60
    assert "-0.50 points" in text


def test_mistakes_in_demo_arguments_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["demo", "--out", str(tmp_path / "d"), "train.learners=1"]) == 2
    assert "needs at least 2 learners (got 1)" in capsys.readouterr().err
    assert main.main(["demo", "--out", str(tmp_path / "d"), "progress=loud"]) == 2
    assert "progress" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main.main(["demo", "--out", str(tmp_path / "file" / "d")]) == 2
    assert "choose another" in capsys.readouterr().err
