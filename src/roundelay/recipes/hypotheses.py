"""What a run has heard, for reports and comparisons: hypotheses beside what was said, of recipe runs and their sub-runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from roundelay.report.page import names_of, write_report
from roundelay.report.run_reader import RunView, WerResult, read_run
from roundelay.speech.score import Texts, paired, read_text, score

NETWORK = "lstm"
CONFUSIONS = 10


@dataclass(frozen=True)
class DecodedSet:
    """One system on one set."""

    system: str
    set: str
    refs: Texts
    hyps: Texts
    speakers: dict[str, str] | None


def load_hypotheses(run: Path) -> list[DecodedSet]:
    """Everything a run has decoded whose transcripts are at hand.

    RUN/decode/SYSTEM/SET.txt of a recipe; RUN/hypotheses/SET.txt of a network trained beside it (RUN/../../data); for the
    network's own folder, what its recipe has decoded with it."""
    run = run.resolve()
    if (run / "hypotheses").is_dir():
        return _read(run.parent.parent, {NETWORK: run / "hypotheses"})
    if run.name.startswith("network") and (run.parent / "decode" / NETWORK).is_dir():
        return _read(run.parent, {NETWORK: run.parent / "decode" / NETWORK})
    order = {name: n for n, name in enumerate(("mono", "tri", "sat", NETWORK))}
    folders = sorted((run / "decode").glob("*/"), key=lambda p: (order.get(p.name, 9), p.name))
    return _read(run, {p.name: p for p in folders})


def _read(root: Path, systems: dict[str, Path]) -> list[DecodedSet]:
    try:
        sets = list(json.loads((root / "data" / "sets.json").read_text())["test"])
    except (OSError, ValueError, KeyError):
        return []
    found = []
    for name in sets:
        text, whose = root / "data" / name / "text", root / "data" / name / "utt2spk"
        if not text.is_file():
            continue
        refs = read_text(text)
        speakers = {u: row[0] for u, row in read_text(whose).items() if row} if whose.is_file() else {}
        known = speakers if all(u in speakers for u in refs) else None
        for system, folder in systems.items():
            if (folder / f"{name}.txt").is_file():
                found.append(DecodedSet(system, name, refs, read_text(folder / f"{name}.txt"), known))
    return found


def words_of(run: Path) -> WerResult | None:
    """Word error rates and the worst confusions; None where there is nothing to add to result.json."""
    found = load_hypotheses(run)
    if not found:
        return None
    words = WerResult()
    told: dict[str, Any] = {}
    if (run / "result.json").is_file():
        told = json.loads((run / "result.json").read_text())
        words.paired = told.get("paired") or []
    last = found[-1].system
    for h in found:
        scored = score(h.refs, h.hyps, h.speakers)
        words.systems.append({"name": h.system, "set": h.set, **scored.as_json()})
        if h.system == last:
            words.confusions += [
                {"name": h.system, "set": h.set, "ref": c.ref, "hyp": c.hyp, "times": c.count}
                for c in scored.confusions(CONFUSIONS)
            ]
    return words


def against_first(runs: Sequence[Path]) -> dict[Path, list[dict[str, Any]]]:
    """How the other runs' networks differ from the first one's on the same utterances, speaker by speaker."""
    names = dict(zip(runs, names_of(runs), strict=True))
    known = {run: {h.set: h for h in load_hypotheses(run) if h.system == NETWORK} for run in dict.fromkeys(runs)}
    spoken = [run for run, sets in known.items() if sets]
    found: dict[Path, list[dict[str, Any]]] = {}
    for other in spoken[1:]:
        first = spoken[0]
        for name, theirs in known[other].items():
            ours = known[first].get(name)
            if ours is not None and ours.refs == theirs.refs:
                pair = paired(ours.refs, ours.hyps, theirs.hyps, ours.speakers)
                told = {"set": name, "from": names[first], "to": names[other], **asdict(pair)}
                found.setdefault(other, []).append(told)
    return found


# -- roundelay report --------------------------------------------------------------------------------------------------


def report(runs: list[Path], out: Path | None = None) -> tuple[Path, list[RunView]]:
    """Writes the page of these runs, with all that is known of their words; returns its path and what was read."""
    read = [read_run(run) for run in runs]  # mistakes show before anything is scored
    extra = {run: words for run in runs if (words := words_of(run)) is not None}
    for path, pairs in against_first(runs).items():
        extra[path].paired = [*extra[path].paired, *pairs]
    where = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    write_report(runs, where, extra)
    for run, name in zip(read, names_of(runs), strict=True):
        run.name, run.words = name, extra.get(run.path, run.words)
    return where, read


def metrics(run: RunView) -> dict[str, Any]:
    """A run in metrics."""
    return {
        "run": str(run.path),
        "name": run.name,
        "state": run.state,
        "strategy": run.strategy,
        "learners": run.learners,
        "seconds": run.seconds and round(run.seconds, 3),
        "samples": run.samples,
        "samples_per_s": run.samples_per_s and round(run.samples_per_s, 3),
        "metrics": run.final,
        "wer": run.wer(),
    }
