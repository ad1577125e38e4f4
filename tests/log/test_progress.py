"""What people see while something takes long: on wide and narrow terminals, without colours, on dumb ones, in files."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from command import ROUNDELAY, Jobs
from terminal import COLOUR, ESCAPE, in_terminal, lines_of

from roundelay.log import progress
from roundelay.log.progress import Progress, ProgressRate, format_duration, wrapped
from roundelay.metrics import dashboard
from roundelay.metrics.dashboard import RunTitle, aggregate, picture, plain

WORDS = ("loss", "lr", "samples/s", "compute", "data", "staleness", "left", "slowest")


def learner(rank: int, **more: object) -> dict[str, object]:
    return {
        "rank": rank, "steps": 10, "samples": 160, "samples_per_s": 160.0, "loss": 1.5, "lr": 0.1, "elapsed_s": 1.0,
        "seconds": {"data": 0.05, "compute": 0.4 * (rank + 1), "comm": 0.1}, "staleness": {"0": 5, "2": 5}, **more,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------ real commands


def train(jobs: Jobs, *more: str) -> list[str]:
    """A run long enough for a panel: three seconds of pauses."""
    file = jobs.task(samples=120, pause_s=0.1)
    text = Path(file).read_text().replace('progress = "none"\n', "")
    Path(file).write_text(text)
    return [ROUNDELAY, "train", file, "learners=2", "run=run", "straggler=1:2.0", "log_every_s=0.3", *more]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("width", "colours", "backend"), [(120, True, "shm"), (60, False, "threads")])
def test_the_panel_fits_the_terminal(width: int, colours: bool, backend: str, jobs: Jobs) -> None:
    code, seen = in_terminal(train(jobs, f"backend={backend}"), jobs.folder, width, **({} if colours else {"NO_COLOR": "1"}))
    assert code == 0, seen
    assert "Traceback" not in seen
    assert max(map(len, lines_of(seen))) <= width
    drawn = ESCAPE.sub("", seen)
    for word in (*WORDS, "╭", "rank"):
        assert word in drawn, f"{word}\n{drawn}"
    assert "\x1b[" in seen, "a panel is drawn by moving the cursor"
    assert bool(COLOUR.search(seen)) == colours


@pytest.mark.slow
def test_a_dumb_terminal_gets_plain_lines_of_its_width(jobs: Jobs) -> None:
    code, seen = in_terminal(train(jobs, "epochs=0.2", "backend=threads"), jobs.folder, 60, TERM="dumb")
    assert code == 0, seen
    assert "\x1b" not in seen
    assert max(map(len, lines_of(seen))) <= 60
    assert "adpsgd: 2 learners" in seen
    assert "held-out" in seen


def test_a_file_gets_plain_lines_without_codes(jobs: Jobs) -> None:
    ended = jobs.start(*train(jobs, "epochs=0.2", "backend=threads")).end(90).expect(0)
    assert "\x1b" not in ended.err + ended.out
    assert "adpsgd: 2 learners" in ended.err


# ------------------------------------------------------------------------------------------------------------- stages


def test_a_file_gets_a_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with Progress("features", "utterances", "auto", out) as shown:
        for done in range(1, 301):
            now[0] += 1.0
            shown.step(done, 300)
    told = out.getvalue().splitlines()
    assert len(told) == 5
    assert told[1] == "features: 40 %, 120 of 300 utterances, 1/s, 3:00 left"


def test_silence_is_silent() -> None:
    out = io.StringIO()
    with Progress("features", "utterances", "none", out) as shown:
        shown.line("a line")
        shown.step(1, 2)
    assert out.getvalue() == ""


def test_a_terminal_that_cannot_move_its_cursor_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for term, kind in (("dumb", "plain"), ("", "plain"), ("xterm", "rich")):
        monkeypatch.setenv("TERM", term)
        assert progress.select_mode("auto", Terminal()) == kind
    assert progress.select_mode("auto", io.StringIO()) == "plain"


def test_times_and_paces() -> None:
    assert [format_duration(s) for s in (7, 750, 10931, float("inf"))] == ["0:07", "12:30", "3:02:11", "–"]
    pace = ProgressRate()
    assert pace.left_s == float("inf")
    pace.at(100, 400, 10.0)  # a resumed run does not begin at 0
    pace.at(200, 400, 20.0)
    assert (pace.rate, pace.left_s, pace.share) == (10.0, 20.0, 0.5)


def test_lines_are_wrapped_under_their_indent() -> None:
    text = "  " + "word " * 20
    lines = wrapped(text, 40).splitlines()
    assert all(len(line) <= 40 for line in lines)
    assert lines[1].startswith("    word")
    assert wrapped(text, 0) == text


# ---------------------------------------------------------------------------------------------------------- the panel


def test_the_learners_figures_are_put_together() -> None:
    whole = aggregate([learner(0, loss=1.0, pair_distance=0.02), learner(1, loss=2.0, samples=480)])  # type: ignore[list-item]
    assert whole.loss == pytest.approx(1.75), "weighted by samples"
    assert whole.samples_per_s == 320.0
    assert whole.shares["compute"] == pytest.approx(0.6)
    assert (whole.staleness, whole.most_stale, whole.apart) == (1.0, 2, 0.02)
    assert (whole.slowest, round(whole.times_slower, 2)) == (1, round(0.85 / 0.45, 2))


def test_a_line_says_everything() -> None:
    pace = ProgressRate()
    pace.at(0, 1000, 0.0)
    pace.at(500, 1000, 10.0)
    line = plain(RunTitle("adpsgd", 500, 21.0, 0.21), pace, aggregate([learner(0), learner(1)]))  # type: ignore[list-item]
    for word in (*WORDS, "50 %", "epoch 1.00 of 2", "6,720 frames/s", "67 × real time", "0:10 left"):
        assert word in line


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("learners", [1, 2, 12])
def test_the_picture_fits(width: int, learners: int) -> None:
    from rich.console import Console

    pace = ProgressRate()
    pace.at(0, 2_000_000, 0.0)
    pace.at(1_000_000, 2_000_000, 86_400.0)
    metrics = [learner(r, samples_per_s=123456.0, pair_distance=0.0123) for r in range(learners)]
    out = io.StringIO()
    drawn = picture(RunTitle("hierarchical(adpsgd), 12 learners", 900_000, 21.0, 0.21), pace, metrics, "loss 1.2345", width)  # type: ignore[arg-type]
    Console(file=out, width=width, color_system=None).print(drawn)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in out.getvalue(), "nothing is cut off"
    assert ("and 4 more" in out.getvalue()) == (learners > dashboard.RANKS_SHOWN)
