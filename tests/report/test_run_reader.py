"""Run directories in all states: complete, truncated, resumed, incomplete, or no run at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from events import BEGAN, evaluation, start, steps, whole, write_recipe, write_run

from roundelay.errors import UsageError
from roundelay.report import series
from roundelay.report.page import names_of, page, write_report
from roundelay.report.run_reader import read_run


def test_metrics_of_a_complete_run(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", whole(2)))
    assert (run.strategy, run.learners, run.state) == ("adpsgd", 2, "finished")
    assert run.seconds == pytest.approx(4.0)
    assert run.samples == 800
    assert run.samples_per_s == pytest.approx(200.0)
    assert run.final == {"loss": 0.2345, "accuracy": 0.8765}


def test_a_truncated_line_is_ignored(tmp_path: Path) -> None:
    events = whole(2)
    run = read_run(write_run(tmp_path / "a", events[:5], cut='{"event": "steps", "time": 17'))
    assert sum(len(s) for s in run.steps.values()) == sum(e["event"] == "steps" for e in events[:5])
    assert run.state == "not finished at 20 %: running or stopped"
    assert "not finished" in page([run])


def test_a_resumed_run_counts_no_idle_time_and_nothing_twice(tmp_path: Path) -> None:
    before = [start(1), steps(0, 1.0, 100), evaluation(1.0, 200, loss=1.0), steps(0, 2.0, 300)]  # 300 is after the checkpoint
    after = [
        start(1, first=200, second=1000.0),
        steps(0, 1001.0, 200),
        steps(0, 1002.0, 300),
        evaluation(1002.1, 400, True, loss=0.5),
    ]
    run = read_run(write_run(tmp_path / "a", before + after))
    assert [e["position"] for e in run.steps[0]] == [100, 200, 300]
    assert run.samples == 300
    assert run.seconds == pytest.approx(4.0, abs=0.01)  # 2 s before the stop and 2 s after it
    assert [e["position"] for e in run.evaluations] == [200, 400]


def test_events_that_another_rank_wrote_before_the_start_event_count(tmp_path: Path) -> None:
    early = [steps(1, 1.0, 100), steps(1, 2.0, 200)]
    run = read_run(write_run(tmp_path / "a", [*early, start(2, second=2.1), steps(0, 3.0, 300), steps(1, 3.0, 400)]))
    assert [e["position"] for e in run.steps[1]] == [100, 200, 400]
    assert run.samples == 400
    assert run.seconds == pytest.approx(3.0)


def test_an_evaluation_is_shown_at_the_time_of_its_checkpoint(tmp_path: Path) -> None:
    saved = {"event": "checkpoint", "time": BEGAN + 1.0, "rank": 0, "position": 100, "spread": 0.125}
    run = read_run(write_run(tmp_path / "a", [steps(0, 1.0, 0), saved, steps(0, 2.0, 100), evaluation(2.0, 100, loss=0.75)]))
    assert series.validation("loss", run, "at") == [(pytest.approx(1.0), 0.75)]
    assert series.spread(run, "position") == [(100, 0.125)]


def test_a_run_without_a_start_event_has_a_page(tmp_path: Path) -> None:
    events = [e for e in whole(3) if e["event"] != "start"]
    run = read_run(write_run(tmp_path / "a", events))
    assert run.learners == 3
    text = page([run])
    assert "0.2345" in text
    assert "did not record its environment" in text


def test_a_run_without_events_has_a_page(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", []))
    assert run.state.startswith("not finished")
    assert "adpsgd" in page([run])


def test_a_recipe_is_represented_by_its_last_network(tmp_path: Path) -> None:
    folder = write_recipe(tmp_path / "r", whole(2))
    write_run(folder / "network-2", whole(1))
    (folder / "network-10").mkdir()  # not trained yet
    run = read_run(folder)
    assert run.training == folder / "network-2"
    assert run.wer() is not None


@pytest.mark.parametrize("what", ["nothing", "empty", "file", "above"])
def test_a_path_that_is_not_a_run_is_a_usage_error(tmp_path: Path, what: str) -> None:
    path = tmp_path / what
    if what == "empty":
        path.mkdir()
    elif what == "file":
        path.write_text("")
    elif what == "above":
        write_run(path / "inside", whole(1))
    with pytest.raises(UsageError) as error:
        write_report([path], tmp_path / "out.html")
    assert str(path) in str(error.value)
    assert ("inside" in str(error.value)) == (what == "above")
    assert not (tmp_path / "out.html").exists()


def test_runs_of_the_same_name_are_distinguished(tmp_path: Path) -> None:
    paths = [tmp_path / "x" / "run", tmp_path / "y" / "run", tmp_path / "z", tmp_path / "w" / "network"]
    assert names_of(paths) == ["x/run", "y/run", "z", "w/network"]
    assert names_of([tmp_path / "z", tmp_path / "z"]) == ["z", "z"]


def test_names_of_metrics_are_text_and_the_page_forbids_scripts(tmp_path: Path) -> None:
    name = 'q"><img src=x onerror=alert(1)>'
    run = read_run(write_run(tmp_path / "a", [start(1), steps(0, 1.0, 100), evaluation(1.0, 100, True, **{name: 1.0})]))
    text = page([run])
    assert "onerror" in text
    assert "<img" not in text
    assert "default-src 'none'" in text
