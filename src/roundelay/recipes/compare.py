"""roundelay compare: runs in groups of equal settings, paired by seed, with intervals for every difference.

Seconds, speed and held-out metrics: the mean of the differences between runs of the same seed, with Student's interval over
the seeds. Word error rate: `paired` of all runs of the two groups, with an interval over resampled speakers; without
hypotheses at hand, over the seeds like the rest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundelay.errors import UsageError
from roundelay.recipes.hypotheses import NETWORK, DecodedSet, load_hypotheses, words_of
from roundelay.report.html import flattened
from roundelay.report.page import differences, names_of
from roundelay.report.run_reader import RunView, read_run
from roundelay.speech.score import paired

# Student's t for a two-sided 95 % interval, by degrees of freedom (any table of it); beyond them the normal's is close.
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
UNITS = {"seconds": "s", "samples_per_s": "samples/s", "wer": "points"}


@dataclass
class ComparedRun:
    """One run, its seed, its metrics and what it has heard."""

    run: RunView
    seed: int
    metrics: dict[str, float]
    decoded: dict[str, DecodedSet]
    """The network's hypotheses by set."""


def entry(path: Path, name: str) -> ComparedRun:
    run = read_run(path, name, words_of(path))
    metrics: dict[str, float] = {}
    done = run.engine is None or run.state.startswith("finished")
    if done and run.seconds and run.samples_per_s:
        metrics |= {"seconds": run.seconds, "samples_per_s": run.samples_per_s}
    final = {k: float(v) for k, v in run.final.items() if done and isinstance(v, int | float)}
    if "logprob" in final:
        final.pop("loss", None)  # the same with the other sign
    metrics |= final
    for row in run.words.systems:
        if row.get("name") == NETWORK:
            metrics[f"wer {row['set']}"] = float(row["wer"])
    found = {h.set: h for h in load_hypotheses(path) if h.system == NETWORK}
    return ComparedRun(run, int(run.settings.get("seed", 0)), metrics, found)


def compare(paths: Sequence[Path]) -> dict[str, Any]:
    """Everything that is printed."""
    entries = [entry(path, name) for path, name in zip(paths, names_of(paths), strict=True)]
    keys = ["strategy", *(k for k in differences([e.run for e in entries], most=20) if k != "seed")]
    if len({e.run.learners for e in entries}) > 1:
        keys.append("learners")
    groups: dict[str, list[ComparedRun]] = {}
    for e in entries:
        groups.setdefault(label(e.run, keys), []).append(e)
    if len(groups) < 2:
        raise UsageError(
            "all runs have the same settings: there is nothing to compare",
            where="RUN",
            hint="give runs of at least two strategies (or other settings); roundelay report shows runs of one kind",
        )
    first, *others = groups
    found = [pair for other in others for pair in differences_of(first, groups[first], other, groups[other])]
    return {"groups": [about(name, members) for name, members in groups.items()], "paired": found}


def label(run: RunView, keys: Sequence[str]) -> str:
    flat = {**flattened(run.settings), "strategy": run.strategy, "learners": run.learners}
    return " ".join(str(flat.get(k, "–")) if k == "strategy" else f"{k}={flat.get(k, '–')}" for k in keys)


def about(name: str, members: Sequence[ComparedRun]) -> dict[str, Any]:
    keys = dict.fromkeys(k for e in members for k in e.metrics)
    values = {k: [e.metrics[k] for e in members if k in e.metrics] for k in keys}
    return {
        "name": name,
        "seeds": sorted({e.seed for e in members}),
        "runs": [str(e.run.path) for e in members],
        "unfinished": [str(e.run.path) for e in members if not e.run.state.startswith("finished")],
        "metrics": {k: {"mean": statistics.mean(v), "low": min(v), "high": max(v), "runs": len(v)} for k, v in values.items()},
    }


def differences_of(name_a: str, a: Sequence[ComparedRun], name_b: str, b: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """b minus a, figure by figure, over the seeds that both have."""
    rows = []
    seeds = sorted({e.seed for e in a} & {e.seed for e in b})
    keys = dict.fromkeys(k for e in [*a, *b] for k in e.metrics)
    for key in keys:
        by_seed = [(mean_of(a, seed, key), mean_of(b, seed, key)) for seed in seeds]
        known = [(x, y) for x, y in by_seed if x is not None and y is not None]
        if not known:
            continue
        row: dict[str, Any] = {"from": name_a, "to": name_b, "figure": key, "seeds": len(known)}
        over_speakers = paired_wer(a, b, seeds, key.removeprefix("wer ")) if key.startswith("wer ") else None
        if over_speakers is not None:
            row |= over_speakers
        else:
            row |= over_seeds([y - x for x, y in known])
            row["ratio"] = sum(y for _, y in known) / sum(x for x, _ in known) if key in ("seconds", "samples_per_s") else None
        rows.append(row)
    return rows


def mean_of(members: Sequence[ComparedRun], seed: int, key: str) -> float | None:
    """Of the runs with this seed: repeats count as one."""
    values = [e.metrics[key] for e in members if e.seed == seed and key in e.metrics]
    return statistics.mean(values) if values else None


def over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """The mean difference with Student's 95 % interval; one seed has none."""
    mean, count = statistics.mean(values), len(values)
    half = None
    if count > 1:
        t = T_95[count - 2] if count - 2 < len(T_95) else 1.96
        half = t * statistics.stdev(values) / math.sqrt(count)
    interval = {"low": None, "high": None} if half is None else {"low": mean - half, "high": mean + half}
    return {"difference": mean, **interval, "over": "seeds", "count": count}


def paired_wer(a: Sequence[ComparedRun], b: Sequence[ComparedRun], seeds: Sequence[int], name: str) -> dict[str, Any] | None:
    """The word error rates' difference over resampled speakers, where both groups have heard the same utterances."""
    ours = [[e.decoded[name] for e in group if e.seed in seeds and name in e.decoded] for group in (a, b)]
    if not ours[0] or not ours[1] or any(h.refs != ours[0][0].refs for group in ours for h in group):
        return None
    one = ours[0][0]
    pair = paired(one.refs, [h.hyps for h in ours[0]], [h.hyps for h in ours[1]], one.speakers)
    return {"difference": pair.difference, "low": pair.low, "high": pair.high, "over": pair.units, "count": pair.count}


# -- for people --------------------------------------------------------------------------------------------------------


def text_of(found: dict[str, Any]) -> str:
    """Two tables: the groups, then what differs between the first and each other."""
    keys = list(dict.fromkeys(k for g in found["groups"] for k in g["metrics"]))
    rows = [["group", "seeds", *keys]]
    for g in found["groups"]:
        cells = [spanned(g["metrics"][k]) if k in g["metrics"] else "-" for k in keys]
        rows.append([g["name"], str(len(g["seeds"])), *cells])
    lines = [*aligned(rows), ""]
    rows = [["difference", "figure", "mean", "95 % interval", "over"]]
    for p in found["paired"]:
        interval = "one pair: none" if p["low"] is None else f"{short(p['low'])} to {short(p['high'])}"
        ratio = f" (x {p['ratio']:.2f})" if p.get("ratio") else ""
        unit = UNITS.get(p["figure"].split()[0], "")
        mean = f"{short(p['difference'])} {unit}".rstrip() + ratio
        rows.append([f"{p['to']} minus {p['from']}", p["figure"], mean, interval, f"{p['count']} {p['over']}"])
    lines += aligned(rows)
    for g in found["groups"]:
        lines += [f"not finished: {run}" for run in g["unfinished"]]
    if not found["paired"]:
        lines.append("the groups have no seed in common, so nothing can be paired")
    return "\n".join(lines)


def spanned(figure: dict[str, Any]) -> str:
    mean = f"{figure['mean']:.4g}"
    return mean if figure["runs"] == 1 else f"{mean} ({figure['low']:.4g} - {figure['high']:.4g})"


def short(x: float) -> str:
    return f"{x:+.4g}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    wide = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, wide, strict=True)).rstrip() for row in rows]
