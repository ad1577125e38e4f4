"""Reads a run directory: an engine's run, or a recipe's with its network, result and stages.

Whatever is missing, cut off or from an older version is left out; only a folder that holds no run at all is an error.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from roundelay.errors import UsageError
from roundelay.metrics.events import read_events

Event = dict[str, Any]
EVENTS = "events.jsonl"


@dataclass
class WerResult:
    """What was heard: word error rates by system and set, differences between systems, the errors made most often."""

    systems: list[dict[str, Any]] = field(default_factory=list)
    paired: list[dict[str, Any]] = field(default_factory=list)
    confusions: list[dict[str, Any]] = field(default_factory=list)
    """{"name": system, "set": …, "ref": …, "hyp": …, "times": …}, the most frequent first."""


@dataclass
class RunView:
    """A run as a report sees it. Times are seconds of training: what lay between a stop and a resume is taken out."""

    name: str
    path: Path
    engine: Path | None
    """The folder with the events; None for a recipe that has not trained yet."""
    settings: dict[str, Any]
    words: WerResult
    stages: dict[str, float]
    typed: dict[str, Any]
    """A recipe's command and the folder it was typed in."""
    start: Event = field(default_factory=dict)
    steps: dict[int, list[Event]] = field(default_factory=dict)
    """By rank; each with `at`, the second it was written, and `from`, the second it began."""
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
        told = self.start.get("learners")
        return (
            int(told)
            if told
            else max([*self.steps, *self.summaries, *self.lost, int(self.settings.get("learners", 1)) - 1]) + 1
        )

    @cached_property
    def seconds(self) -> float | None:
        """From the first step to the last."""
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
        """Held-out metrics of the model the run ended with, or of the last one judged."""
        last = [e for e in self.evaluations if e.get("final")] or self.evaluations
        return dict(last[-1].get("metrics") or {}) if last else {}

    @property
    def position(self) -> int:
        """Global samples done."""
        done = [int(e.get("position") or 0) for events in self.steps.values() for e in events]
        return max([*done, *(int(e.get("position") or 0) for e in self.evaluations)], default=0)

    @property
    def state(self) -> str:
        if self.engine is None:
            return "no training recorded"
        if self.ended is not None or any(e.get("final") for e in self.evaluations):
            return "finished" if not self.lost else f"finished without {', '.join(f'rank {r}' for r in sorted(self.lost))}"
        total = self.start.get("total")
        share = f" at {100 * self.position / total:.0f} %" if total else ""
        return f"not finished{share}: still going on, or stopped"

    def wer(self) -> dict[str, Any] | None:
        """The word error rate of the trained network on the first test set; of the last system where there is none."""
        rows = [r for r in self.words.systems if r.get("name") == "lstm"] or self.words.systems[-1:]
        return rows[0] if rows else None


def engine_folder(path: Path) -> Path | None:
    """Where the events lie: the folder itself, or the last network of a recipe's run."""
    if (path / EVENTS).is_file():
        return path
    found = [p for p in path.glob("network*") if (p / EVENTS).is_file()]
    return max(found, key=lambda p: int(p.name.partition("-")[2] or 1)) if found else None


def read_run(path: str | Path, name: str = "", words: WerResult | None = None) -> RunView:
    """The run in this folder. `words` replaces what result.json says."""
    path = Path(path)
    if not path.is_dir():
        raise UsageError(f"there is no folder {path}", where="RUN", hint="give a run directory: what `run=…` named, or runs/…")
    engine = engine_folder(path)
    result = _json(path / "result.json")
    if engine is None and "systems" not in result and not (path / "config.toml").is_file():
        inside = sorted(p.name for p in path.iterdir() if p.is_dir() and engine_folder(p) is not None)[:5]
        raise UsageError(
            f"{path} is not a run: it holds no {EVENTS}, no network/ and no result.json",
            where="RUN",
            hint=f"give a folder in it: {', '.join(inside)}" if inside else "give what `roundelay train` or `run` has written",
        )
    heard = words or WerResult(result.get("systems") or [], result.get("paired") or [])
    settings, typed = _toml((engine or path) / "config.toml"), _json(path / "command.json")
    run = RunView(name or path.resolve().name, path, engine, settings, heard, _stages(path), typed)
    if engine is not None:
        _sort(run, list(read_events(engine / EVENTS)))
    return run


def _sort(run: RunView, events: Sequence[Event]) -> None:
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
    made = {e.get("position"): e["at"] for e in run.checkpoints}
    for e in run.evaluations:  # judged later than made: a learner does it at its own next step
        e["at"] = made.get(e.get("position"), e["at"]) if not e.get("final") else e["at"]


def _parts(events: list[Event]) -> list[tuple[list[Event], float]]:
    """The events from one start to the next, with what to take off their times. What a stopped run had done beyond the
    checkpoint that the next one went on from is left out, as that one does it again."""
    cuts = [i for i, e in enumerate(events) if e.get("event") == "start"]
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


def _stages(path: Path) -> dict[str, float]:
    """Seconds of a recipe's stages, in the order they were done."""
    marks = sorted((path / "stages").glob("*.json"), key=lambda p: p.stat().st_mtime)
    found = {mark.stem: _json(mark).get("seconds") for mark in marks}
    return {name: float(s) for name, s in found.items() if isinstance(s, int | float)}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
