"""Events are read back as written, also after a crash or from several writers."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from roundelay.metrics.events import ALWAYS, FIELDS, EventLog, read_events

metrics = st.dictionaries(
    st.text(min_size=1).filter(lambda k: k not in ("event", "time", "rank", "self")),
    st.one_of(st.integers(), st.floats(allow_nan=False), st.text(), st.booleans(), st.none(), st.lists(st.integers())),
    max_size=4,
)


def write(path: Path, rank: int, rows: list[dict]) -> None:
    log = EventLog(path, rank)
    for row in rows:
        log.write("steps", **row)
    log.close()


@given(st.lists(metrics, max_size=5))
def test_events_are_read_back(tmp_path_factory, rows: list[dict]) -> None:
    path = tmp_path_factory.mktemp("run") / "events.jsonl"
    write(path, 3, rows)
    events = list(read_events(path))
    assert [{k: e[k] for k in e if k not in ("event", "time", "rank")} for e in events] == rows
    assert all(e["event"] == "steps" and e["rank"] == 3 for e in events)


@given(st.integers(1, 60))
def test_an_incomplete_last_line_is_skipped(tmp_path_factory, cut: int) -> None:
    path = tmp_path_factory.mktemp("run") / "events.jsonl"
    write(path, 0, [{"step": 1}, {"step": 2, "text": "schräg ✓"}])
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    path.write_bytes(whole[: max(first, len(whole) - cut)])
    assert [e["step"] for e in read_events(path)] == ([1] if cut > 1 else [1, 2])


def test_lines_of_several_writers_do_not_interleave(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    rows = [{"text": "x" * 500, "number": n} for n in range(200)]
    writers = [threading.Thread(target=write, args=(path, rank, rows)) for rank in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(events) == 800
    for rank in range(4):
        assert [e["number"] for e in events if e["rank"] == rank] == list(range(200))


def test_a_log_without_a_path_writes_nothing(tmp_path: Path) -> None:
    log = EventLog(None, 0)
    log.write("steps", step=1)
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_every_field_is_described() -> None:
    descriptions = {"always": ALWAYS, **FIELDS}
    for event, fields in descriptions.items():
        assert all(len(text.split()) >= 2 for text in fields.values()), event
