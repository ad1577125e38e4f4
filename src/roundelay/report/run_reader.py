"""Read a run directory: a training run, or the run of a recipe with its network, result and stages.

Missing or truncated files are tolerated. Only a directory without any run is an error.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from roundelay.errors import UsageError, reading
from roundelay.metrics.events import read_events
from roundelay.metrics.run_files import COMMAND, CONFIG, EVENTS, NETWORK, RESULT, STAMPS, training_dir

Event = dict[str, Any]


@dataclass
class WerResult:
    """Word error rates by system and set, paired comparisons of systems, and the most frequent confusions."""

    systems: list[dict[str, Any]] = field(default_factory=list)
    paired: list[dict[str, Any]] = field(default_factory=list)
    confusions: list[dict[str, Any]] = field(default_factory=list)
    """{"name": system, "set": …, "ref": …, "hyp": …, "count": …}, the most frequent first."""


@dataclass
class RunView:
    """A run as a report shows it. Times are seconds of training, without the time between a stop and a resume."""

    name: str
    path: Path
    training: Path | None
    """The directory with the events; None for a recipe that has not trained yet."""
    settings: dict[str, Any]
    words: WerResult
    stages: dict[str, float]
    command: dict[str, Any]
    """The command that started a recipe, and its working directory; empty for a training run."""
    start: Event = field(default_factory=dict)
    steps: dict[int, list[Event]] = field(default_factory=dict)
    """Step events by rank, with their begin (`from`) and end (`at`) in seconds."""
    evaluations: list[Event] = field(default_factory=list)
    checkpoints: list[Event] = field(default_factory=list)
    lost: dict[int, Event] = field(default_factory=dict)
    stalls: list[Event] = field(default_factory=list)
    summaries: dict[int, Event] = field(default_factory=dict)
    ended: Event | None = None

    @property
    def strategy(self) -> str:
        return str(self.settings.get("strategy") or self.start.get("strategy") or "")

    @cached_property
    def learners(self) -> int:
        if self.start.get("learners"):
            return int(self.start["learners"])
        return max([*self.steps, *self.summaries, *self.lost, _learners_of(self.settings) - 1]) + 1

    @cached_property
    def seconds(self) -> float | None:
        """Seconds from the begin of the first step to the end of the last."""
        ends = [e["at"] for events in self.steps.values() for e in events]
        begins = [e["from"] for events in self.steps.values() for e in events]
        return max(ends) - min(begins) if ends else None

    @cached_property
    def samples(self) -> int:
        return sum(int(e.get("samples") or 0) for events in self.steps.values() for e in events)

    @property
    def samples_per_s(self) -> float | None:
        return self.samples / self.seconds if self.seconds else None

    @property
    def final(self) -> dict[str, float]:
        """Validation metrics of the final model, or of the last evaluated checkpoint."""
        last = [e for e in self.evaluations if e.get("final")] or self.evaluations
        return dict(last[-1].get("metrics") or {}) if last else {}

    @property
    def position(self) -> int:
        """Global samples at the last event."""
        done = [int(e.get("position") or 0) for events in self.steps.values() for e in events]
        return max([*done, *(int(e.get("position") or 0) for e in self.evaluations)], default=0)

    @property
    def state(self) -> str:
        if self.training is None:
            return "without a training run"
        if self.ended is not None or any(e.get("final") for e in self.evaluations):
            return "finished" if not self.lost else f"finished without {', '.join(f'rank {r}' for r in sorted(self.lost))}"
        total = self.start.get("total")
        share = f" at {100 * self.position / total:.0f} %" if total else ""
        return f"not finished{share}: running or stopped"

    def wer(self) -> dict[str, Any] | None:
        """Return the word error rate of the network on the first test set, or of the last system if there is no network."""
        rows = [r for r in self.words.systems if r.get("name") == "lstm"] or self.words.systems[-1:]
        return rows[0] if rows else None


def read_run(path: str | Path, name: str = "", words: WerResult | None = None) -> RunView:
    """Read the run in a directory. `words` replaces the contents of result.json. Raise UsageError if it holds no run."""
    path = Path(path)
    if not path.is_dir():
        raise UsageError(f"the run directory {path} does not exist", where="RUN", hint="name a directory such as runs/spoken")
    training = training_dir(path)
    result = _json(path / RESULT)
    if training is None and "systems" not in result and not (path / CONFIG).is_file():
        inside = sorted(p.name for p in path.iterdir() if p.is_dir() and training_dir(p) is not None)[:5]
        raise UsageError(
            f"{path} is not a run directory: it has no {EVENTS}, no {NETWORK}/ and no {RESULT}",
            where="RUN",
            hint=f"name a directory inside it: {', '.join(inside)}" if inside else "name a directory such as runs/spoken",
        )
    words = words or WerResult(
        valid_rows(result.get("systems"), ("wer", "low", "high")), valid_rows(result.get("paired"), PAIRED_NUMBERS)
    )
    settings, command = _toml((training or path) / CONFIG), _json(path / COMMAND)
    run = RunView(name or path.resolve().name, path, training, settings, words, _stages(path), command)
    if training is not None:
        with reading("the events", training / EVENTS):
            _sort(run, [event for raw in read_events(training / EVENTS) if (event := valid_event(raw)) is not None])
    return run


# -- validation ------------------------------------------------------------------------------------------------------------

LARGEST = 1e100
"""Numbers beyond this are not shown: sums and squares of them would overflow."""
MAX_LEARNERS = 100_000
PAIRED_NUMBERS = ("difference", "low", "high")
NUMBERS = {
    "time", "first", "total", "samples", "parameters", "step", "steps", "samples_per_s", "loss", "lr", "position", "loader_s",
    "elapsed_s", "cpu_s", "exchanges", "bytes", "pair_distance", "exchange_s", "spread", "effective_rate", "waited_s",
    "exchanges_per_gradient", "longest_gap", "gap_p99",
}  # fmt: skip
RANKS = {"rank", "lost", "learners"}
MAPPINGS = {"metrics", "staleness", "exchange_gaps", "environment", "mixing"}
LISTS = {"hosts", "batches", "waiting_for"}


def is_number(x: object) -> bool:
    """Return whether x is a number that a report can compute with: not a bool, not beyond LARGEST; NaN is allowed."""
    return isinstance(x, int | float) and not isinstance(x, bool) and not abs(x) > LARGEST


def valid_event(event: Event) -> Event | None:
    """Return the event without the fields whose type or value is wrong. None without a kind and a time."""
    kept: Event = {}
    for key, value in event.items():
        if key in RANKS:
            fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_LEARNERS
        elif key in NUMBERS:
            fits = value is None or (is_number(value) and (key in ("loss", "lr") or math.isfinite(value)))
        elif key in MAPPINGS:
            fits = isinstance(value, dict)
        elif key in LISTS:
            fits = isinstance(value, list)
        elif key == "seconds":
            fits = isinstance(value, dict) or is_number(value)
        else:
            fits = True
        if fits:
            kept[key] = value
    for key in ("metrics", "seconds"):
        if isinstance(kept.get(key), dict):
            kept[key] = {name: x for name, x in kept[key].items() if x is None or is_number(x)}
    for key in ("staleness", "exchange_gaps"):
        if key in kept:
            counts = kept[key].items()
            kept[key] = {
                k: v for k, v in counts if k.isdecimal() and len(k) < 10 and is_number(v) and math.isfinite(v) and v >= 0
            }
    if "batches" in kept:
        kept["batches"] = [x for x in kept["batches"] if is_number(x)]
    if "mixing" in kept and not valid_mixing(kept["mixing"]):
        del kept["mixing"]
    return kept if isinstance(kept.get("event"), str) and kept.get("time") is not None else None


def valid_mixing(mixing: dict[str, Any]) -> bool:
    """Return whether the description of the averaging has the types and indices that run_metadata writes."""
    nodes, weights, machines = mixing.get("nodes") or [], mixing.get("weights") or [], mixing.get("machines") or []
    if not all(isinstance(rows, list) for rows in (nodes, weights, machines)) or not all(isinstance(m, list) for m in machines):
        return False
    numbers = [mixing.get(key) or 0 for key in ("every_pair", "gap", "rounds_to_1_percent", "period")]
    ranks = [*nodes, *(rank for machine in machines for rank in machine)]
    return (
        all(is_number(x) and math.isfinite(x) for x in numbers)
        and all(isinstance(rank, int) for rank in ranks)
        and all(isinstance(row, list) and len(row) == 3 and all(is_number(x) for x in row) for row in weights)
        and all(0 <= i < len(nodes) and 0 <= j < len(nodes) and math.isfinite(w) for i, j, w in weights)
    )


def valid_rows(rows: object, numbers: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of result.json whose named fields are finite numbers. Other fields are numbers, text or dropped."""
    if not isinstance(rows, list):
        return []
    kept = []
    for row in rows:
        if isinstance(row, dict) and all(is_number(row.get(k)) and math.isfinite(row[k]) for k in numbers):
            text = {"name": "", "set": "", "from": "", "to": ""}
            kept.append(
                {**{k: str(row.get(k, "")) for k in text}, **{k: v for k, v in row.items() if k not in text and is_number(v)}}
            )
    return kept


def _sort(run: RunView, events: Sequence[Event]) -> None:
    """Distribute the events to the fields of the run."""
    for part, offset in _parts([e for e in events if isinstance(e, dict) and isinstance(e.get("time"), int | float)]):
        for event in part:
            event["at"] = event["time"] - offset
            kind, rank = event.get("event"), event.get("rank")
            if kind == "start":
                run.start = event
            elif kind == "steps" and isinstance(rank, int):
                event["from"] = event["at"] - float(event.get("elapsed_s") or 0)
                run.steps.setdefault(rank, []).append(event)
            elif kind == "evaluation" and isinstance(event.get("metrics"), dict):
                run.evaluations.append(event)
            elif kind == "checkpoint":
                run.checkpoints.append(event)
            elif kind == "lost" and isinstance(event.get("lost"), int):
                run.lost.setdefault(event["lost"], event)
            elif kind == "stall":
                run.stalls.append(event)
            elif kind == "summary" and isinstance(rank, int):
                run.summaries[rank] = event
            elif kind == "run":
                run.ended = event
    run.evaluations.sort(key=lambda e: (e.get("position") or 0, bool(e.get("final"))))
    saved = {e.get("position"): e["at"] for e in run.checkpoints}
    for e in run.evaluations:  # a learner evaluates a checkpoint at its next step: show it at the time of the checkpoint
        e["at"] = saved.get(e.get("position"), e["at"]) if not e.get("final") else e["at"]


def _parts(events: list[Event]) -> list[tuple[list[Event], float]]:
    """Return the events from one start to the next, each part with an offset to subtract from its times.

    Events of a stopped run after the checkpoint from which it was resumed are dropped, because the resumed run repeats them.
    Events before the start of a new run belong to it: another rank may write its first events before rank 0 writes the start.
    """
    cuts = [i for i, e in enumerate(events) if e.get("event") == "start"]
    if cuts and not events[cuts[0]].get("first"):
        cuts = cuts[1:]
    bounds = [0, *[c for c in cuts if c > 0], len(events)]
    parts: list[tuple[list[Event], float]] = []
    done = 0.0
    for begin, end in pairwise(bounds):
        part = events[begin:end]
        if not part:
            continue
        first = part[0].get("first") if part[0].get("event") == "start" else None
        if first is not None:
            parts = [([e for e in old if _before(e, first)], offset) for old, offset in parts]
        born = [e["time"] - float(e.get("elapsed_s") or 0) for e in part if e.get("event") == "steps"] or [part[0]["time"]]
        parts.append((part, min(born) - done))
        done += max(e["time"] for e in part) - min(born)
    return parts


def _before(event: Event, first: int) -> bool:
    if event.get("event") in ("run", "summary") or event.get("final"):
        return False
    return event.get("event") not in ("steps", "evaluation", "checkpoint") or int(event.get("position") or 0) <= first


def _learners_of(settings: dict[str, Any]) -> int:
    learners = settings.get("learners", 1)
    return learners if isinstance(learners, int) and 0 < learners < MAX_LEARNERS else 1


def _stages(path: Path) -> dict[str, float]:
    """Return the seconds of a recipe's stages, in the order in which they were done."""
    stamps = sorted((path / STAMPS).glob("*.json"), key=lambda p: p.stat().st_mtime)
    seconds = {stamp.stem: _json(stamp).get("seconds") for stamp in stamps}
    return {name: float(s) for name, s in seconds.items() if is_number(s) and math.isfinite(s)}  # type: ignore[arg-type]


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
