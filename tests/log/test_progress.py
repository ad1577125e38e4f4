"""Progress bars and the dashboard: wide, narrow and dumb terminals, without colors, in files."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from command import ROUNDELAY, Jobs
from terminal import COLOR, ESCAPE, in_terminal, lines_of

from roundelay.log import progress
from roundelay.log.progress import Progress, ProgressRate, format_duration, wrap
from roundelay.metrics import dashboard
from roundelay.metrics.dashboard import RunTitle, aggregate, format_exchanges, format_line, render_panel

WORDS = ("loss", "lr", "samples/s", "compute", "data", "staleness", "left", "slowest")


def learner(rank: int, **more: object) -> dict[str, object]:
    return {
        "rank": rank, "steps": 10, "samples": 160, "samples_per_s": 160.0, "loss": 1.5, "lr": 0.1, "elapsed_s": 1.0,
        "seconds": {"data": 0.05, "compute": 0.4 * (rank + 1), "comm": 0.1}, "staleness": {"0": 5, "2": 5}, **more,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------ real commands


def train(jobs: Jobs, *more: str) -> list[str]:
    """Return the command of a run that is long enough for a panel: three seconds of pauses."""
    file = jobs.task(samples=120, pause_s=0.1)
    text = Path(file).read_text().replace('progress = "none"\n', "")
    Path(file).write_text(text)
    return [ROUNDELAY, "train", file, "learners=2", "run=run", "straggler=1:2.0", "log_every_s=0.3", *more]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("width", "colors", "backend"), [(120, True, "shm"), (60, False, "threads")])
def test_the_panel_fits_the_terminal(width: int, colors: bool, backend: str, jobs: Jobs) -> None:
    code, output = in_terminal(train(jobs, f"backend={backend}"), jobs.folder, width, **({} if colors else {"NO_COLOR": "1"}))
    assert code == 0, output
    assert "Traceback" not in output
    assert max(map(len, lines_of(output))) <= width
    text = ESCAPE.sub("", output)
    for word in (*WORDS, "╭", "rank"):
        assert word in text, f"{word}\n{text}"
    assert "\x1b[" in output, "the panel is redrawn by moving the cursor"
    assert bool(COLOR.search(output)) == colors


@pytest.mark.slow
def test_a_dumb_terminal_gets_plain_lines_of_its_width(jobs: Jobs) -> None:
    code, output = in_terminal(train(jobs, "epochs=0.2", "backend=threads"), jobs.folder, 60, TERM="dumb")
    assert code == 0, output
    assert "\x1b" not in output
    assert max(map(len, lines_of(output))) <= 60
    assert "adpsgd: 2 learners" in output
    assert "held-out" in output


def test_a_file_gets_plain_lines_without_codes(jobs: Jobs) -> None:
    ended = jobs.start(*train(jobs, "epochs=0.2", "backend=threads")).end(90).expect(0)
    assert "\x1b" not in ended.err + ended.out
    assert "adpsgd: 2 learners" in ended.err


# ----------------------------------------------------------------------------------------------------------- progress


def test_a_file_gets_a_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with Progress("features", "utterances", "auto", out) as bar:
        for done in range(1, 301):
            now[0] += 1.0
            bar.step(done, 300)
    lines = out.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[1] == "features: 40 %, 120 of 300 utterances, 1/s, 3:00 left"


@pytest.mark.parametrize("width", [40, 120])
def test_a_terminal_gets_a_bar_that_fits_its_width(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    out = Terminal()
    with Progress("features", "utterances", "auto", out) as bar:
        bar.step(30, 300)
        bar.line("a line that stays")
    text = ESCAPE.sub("", out.getvalue())
    assert max(map(len, lines_of(text))) <= width
    assert "features" in text
    assert " 10 %" in text
    assert "a line that stays" in text
    assert ("━" in text) == (width >= progress.NARROW)
    assert not COLOR.search(out.getvalue())


def test_mode_none_prints_nothing() -> None:
    out = io.StringIO()
    with Progress("features", "utterances", "none", out) as bar:
        bar.line("a line")
        bar.step(1, 2)
    assert out.getvalue() == ""


def test_the_mode_depends_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for term, mode in (("dumb", "plain"), ("", "plain"), ("xterm", "rich")):
        monkeypatch.setenv("TERM", term)
        assert progress.select_mode("auto", Terminal()) == mode
    assert progress.select_mode("auto", io.StringIO()) == "plain"


def test_durations_and_rates() -> None:
    assert [format_duration(s) for s in (7, 750, 10931, float("inf"))] == ["0:07", "12:30", "3:02:11", "–"]
    progress_rate = ProgressRate()
    assert progress_rate.eta_s == float("inf")
    progress_rate.update(100, 400, 10.0)  # a resumed run does not start at 0
    progress_rate.update(200, 400, 20.0)
    assert (progress_rate.rate, progress_rate.eta_s, progress_rate.fraction) == (10.0, 20.0, 0.5)


def test_lines_are_wrapped_under_their_indent() -> None:
    text = "  " + "word " * 20
    lines = wrap(text, 40).splitlines()
    assert all(len(line) <= 40 for line in lines)
    assert lines[1].startswith("    word")
    assert wrap(text, 0) == text


# ---------------------------------------------------------------------------------------------------------- dashboard


def test_metrics_of_all_learners_are_aggregated() -> None:
    fleet = aggregate([learner(0, loss=1.0, pair_distance=0.02), learner(1, loss=2.0, samples=480)])  # type: ignore[list-item]
    assert fleet.loss == pytest.approx(1.75), "weighted by samples"
    assert fleet.samples_per_s == 320.0
    assert fleet.shares["compute"] == pytest.approx(0.6)
    assert (fleet.staleness, fleet.max_staleness, fleet.pair_distance) == (1.0, 2, 0.02)
    assert (fleet.slowest, round(fleet.slowdown, 2)) == (1, round(0.85 / 0.45, 2))


def test_exchanges_are_counted_over_the_learners_that_have_some() -> None:
    ranks = [learner(0, exchanges=12, longest_gap=3), learner(1, exchanges=3, longest_gap=17), learner(2, exchanges=0)]
    fleet = aggregate(ranks)  # type: ignore[arg-type]
    assert (fleet.exchanges_per_gradient, fleet.longest_gap) == (0.75, 17), "rank 2 takes no part, as in a hierarchy"
    assert format_exchanges(fleet) == "0.75 per gradient, at most 17 gradients without one"
    none = aggregate([learner(0, exchanges=0, longest_gap=10)])  # type: ignore[list-item]
    assert format_exchanges(none) == "0.00 per gradient, at most 10 gradients without one", "exchanges that fail are visible"
    assert format_exchanges(aggregate([learner(0, exchanges=0)])) == "", "a strategy without gossip"  # type: ignore[list-item]


@pytest.mark.parametrize("gossip", [True, False])
def test_line_and_panel_show_exchanges_of_gossip_only(gossip: bool) -> None:
    from rich.console import Console

    rate = ProgressRate()
    rate.update(0, 1000, 0.0)
    rate.update(500, 1000, 10.0)
    more = {"exchanges": 12, "longest_gap": 1} if gossip else {"exchanges": 0}
    ranks, title = [learner(0, **more), learner(1, **more)], RunTitle("adpsgd", 500)
    out = io.StringIO()
    Console(file=out, width=80, color_system=None).print(render_panel(title, rate, ranks, "", 80))  # type: ignore[arg-type]
    line = format_line(title, rate, aggregate(ranks))  # type: ignore[arg-type]
    text = "1.20 per gradient, at most 1 gradient without one"
    assert (f"exchanges {text};" in line, f"exchanges  {text}" in out.getvalue()) == (gossip, gossip)
    assert ("exchanges" in line, "exchanges" in out.getvalue()) == (gossip, gossip)


def test_the_plain_line_has_all_metrics() -> None:
    rate = ProgressRate()
    rate.update(0, 1000, 0.0)
    rate.update(500, 1000, 10.0)
    line = format_line(RunTitle("adpsgd", 500, 21.0, 0.21), rate, aggregate([learner(0), learner(1)]))  # type: ignore[list-item]
    for word in (*WORDS, "50 %", "epoch 1.00 of 2", "6,720 frames/s", "67 × real time", "0:10 left"):
        assert word in line


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("learners", [1, 2, 12])
def test_the_panel_fits_the_width(width: int, learners: int) -> None:
    from rich.console import Console

    rate = ProgressRate()
    rate.update(0, 2_000_000, 0.0)
    rate.update(1_000_000, 2_000_000, 86_400.0)
    more = {"pair_distance": 0.0123, "exchanges": 12, "longest_gap": 1234}
    metrics = [learner(r, samples_per_s=123456.0, **more) for r in range(learners)]
    out = io.StringIO()
    title = RunTitle("hierarchical(adpsgd), 12 learners", 900_000, 21.0, 0.21)
    panel = render_panel(title, rate, metrics, "loss 1.2345", width)  # type: ignore[arg-type]
    Console(file=out, width=width, color_system=None).print(panel)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in out.getvalue(), "nothing is cut off"
    row = next(line for line in lines if "exchanges" in line)
    assert "1.20 per gradient, at most 1234" in row
    assert "without one" in row, "in one line"
    assert ("and 4 more" in out.getvalue()) == (learners > dashboard.MAX_RANKS_SHOWN)
