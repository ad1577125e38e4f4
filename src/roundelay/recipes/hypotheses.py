"""Hypotheses of a run with their references, for reports and comparisons: of recipe runs and of networks inside them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from roundelay.errors import PARSE_ERRORS, reading
from roundelay.metrics import run_files
from roundelay.recipes.run_layout import LSTM, RunLayout, hypothesis_file
from roundelay.recipes.systems import SYSTEMS
from roundelay.report.page import names_of, write_report
from roundelay.report.run_reader import PAIRED_NUMBERS, RunView, WerResult, read_run, valid_rows
from roundelay.speech.score import Texts, paired, read_text, score

CONFUSIONS = 10


@dataclass(frozen=True)
class DecodedSet:
    """Hypotheses of one system on one set."""

    system: str
    set: str
    refs: Texts
    hyps: Texts
    speakers: dict[str, str] | None


def load_hypotheses(run: Path) -> list[DecodedSet]:
    """Return all hypotheses of a run that have references.

    RUN/decode/SYSTEM/SET.txt of a recipe, or RUN/hypotheses/SET.txt of a network that a benchmark trained inside a recipe's
    run. For the training directory of a recipe's network, the recipe's hypotheses of that network.
    """
    layout = RunLayout(run.resolve())
    if layout.hypotheses.is_dir():
        return _read(layout.base(), {LSTM: layout.hypotheses})
    parent = RunLayout(layout.run.parent)
    if layout.run.name.startswith(run_files.NETWORK) and parent.decode(LSTM).is_dir():
        return _read(parent, {LSTM: parent.decode(LSTM)})
    order = {name: n for n, name in enumerate(SYSTEMS)}
    folders = sorted(layout.decode_root.glob("*/"), key=lambda p: (order.get(p.name, len(order)), p.name))
    return _read(layout, {p.name: p for p in folders})


def _read(layout: RunLayout, systems: dict[str, Path]) -> list[DecodedSet]:
    try:
        sets = layout.test_sets()
    except PARSE_ERRORS:
        return []
    decoded = []
    for name in sets:
        text, utt2spk = layout.data_set(name) / "text", layout.data_set(name) / "utt2spk"
        if not text.is_file():
            continue
        refs = read_text(text)
        speakers = {u: row[0] for u, row in read_text(utt2spk).items() if row} if utt2spk.is_file() else {}
        complete = speakers if all(u in speakers for u in refs) else None
        for system, folder in systems.items():
            path = hypothesis_file(folder, name)
            if path.is_file():
                decoded.append(DecodedSet(system, name, refs, read_text(path), complete))
    return decoded


def word_errors(run: Path) -> WerResult | None:
    """Return word error rates and the most frequent confusions. None if the run has no hypotheses."""
    decoded = load_hypotheses(run)
    if not decoded:
        return None
    words = WerResult()
    result = RunLayout(run).result
    if result.is_file():
        words.paired = read_paired(result)
    last = decoded[-1].system
    for h in decoded:
        scored = score(h.refs, h.hyps, h.speakers)
        words.systems.append({"name": h.system, "set": h.set, **scored.as_json()})
        if h.system == last:
            words.confusions += [
                {"name": h.system, "set": h.set, "ref": c.ref, "hyp": c.hyp, "count": c.count}
                for c in scored.confusions(CONFUSIONS)
            ]
    return words


def read_paired(path: Path) -> list[dict[str, Any]]:
    """Return the paired comparisons of a result.json. Raise DataError if it is not a JSON object."""
    with reading("the result", path, "decode again: roundelay run"):
        return valid_rows(dict(json.loads(path.read_text(encoding="utf-8"))).get("paired"), PAIRED_NUMBERS)


def compare_with_first(runs: Sequence[Path]) -> dict[Path, list[dict[str, Any]]]:
    """Return paired comparisons of each later run's network with the first one's, on the sets that both decoded."""
    names = dict(zip(runs, names_of(runs), strict=True))
    by_run = {run: {h.set: h for h in load_hypotheses(run) if h.system == LSTM} for run in dict.fromkeys(runs)}
    decoded = [run for run, sets in by_run.items() if sets]
    rows: dict[Path, list[dict[str, Any]]] = {}
    for run in decoded[1:]:
        first = decoded[0]
        for name, other in by_run[run].items():
            base = by_run[first].get(name)
            if base is not None and base.refs == other.refs:
                pair = paired(base.refs, base.hyps, other.hyps, base.speakers)
                rows.setdefault(run, []).append({"set": name, "from": names[first], "to": names[run], **asdict(pair)})
    return rows


# -- roundelay report ------------------------------------------------------------------------------------------------------


def report(runs: list[Path], out: Path | None = None) -> tuple[Path, list[RunView]]:
    """Write the report page of the runs, with word error rates from their hypotheses. Return its path and the runs."""
    views = [read_run(run) for run in runs]  # raises before anything is scored
    extra = {run: words for run in runs if (words := word_errors(run)) is not None}
    for path, pairs in compare_with_first(runs).items():
        extra[path].paired = [*extra[path].paired, *pairs]
    where = out or (RunLayout(runs[0]).report if len(runs) == 1 else Path(run_files.REPORT))
    write_report(runs, where, extra)
    for view, name in zip(views, names_of(runs), strict=True):
        view.name, view.words = name, extra.get(view.path, view.words)
    return where, views


def metrics(run: RunView) -> dict[str, Any]:
    """Return the metrics of a run for --json."""
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
