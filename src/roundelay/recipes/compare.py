"""roundelay compare: group runs by settings, pair them by seed, and report a confidence interval for every difference.

Seconds, speed and validation metrics: the mean difference between runs of the same seed, with Student's interval over the
seeds. Word error rate: a paired comparison of all runs of the two groups, with an interval over resampled speakers. If a run
has no hypotheses, its word error rate is compared over the seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundelay.errors import UsageError, reading
from roundelay.recipes.hypotheses import DecodedSet, load_hypotheses, word_errors
from roundelay.recipes.run_layout import LSTM
from roundelay.report.html import flattened
from roundelay.report.page import differences, names_of
from roundelay.report.run_reader import RunView, read_run
from roundelay.speech.score import paired

T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t of a two-sided 95 % interval by degrees of freedom. Beyond 15 the normal distribution is close enough."""
T_95_NORMAL = 1.96
UNITS = {"seconds": "s", "samples_per_s": "samples/s", "wer": "points"}


@dataclass
class ComparedRun:
    """One run with its seed, its metrics and its hypotheses."""

    run: RunView
    seed: int
    metrics: dict[str, float]
    decoded: dict[str, DecodedSet]
    """Hypotheses of the network by set."""


def read_compared_run(path: Path, name: str) -> ComparedRun:
    run = read_run(path, name, word_errors(path))
    metrics: dict[str, float] = {}
    done = run.training is None or run.state.startswith("finished")
    if done and run.seconds and run.samples_per_s:
        metrics |= {"seconds": run.seconds, "samples_per_s": run.samples_per_s}
    final = {k: float(v) for k, v in run.final.items() if done and isinstance(v, int | float)}
    if "logprob" in final:
        final.pop("loss", None)  # the negative of logprob
    metrics |= final
    for row in run.words.systems:
        if row.get("name") == LSTM:
            metrics[f"wer {row['set']}"] = float(row["wer"])
    decoded = {h.set: h for h in load_hypotheses(path) if h.system == LSTM}
    return ComparedRun(run, int(run.settings.get("seed", 0)), metrics, decoded)


def compare(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the groups, and the differences between the first group and each other group.

    Raises UsageError if all runs have the same settings.
    """
    runs = []
    for path, name in zip(paths, names_of(paths), strict=True):
        with reading("the run", path, "check the files of the run directory"):
            runs.append(read_compared_run(path, name))
    keys = ["strategy", *(k for k in differences([r.run for r in runs], most=20) if k != "seed")]
    if len({r.run.learners for r in runs}) > 1:
        keys.append("learners")
    groups: dict[str, list[ComparedRun]] = {}
    for r in runs:
        groups.setdefault(label(r.run, keys), []).append(r)
    if len(groups) < 2:
        raise UsageError(
            "the runs must differ in at least one setting (got one group)",
            where="RUN",
            hint="add runs of another strategy or other settings; use roundelay report to show runs of one kind",
        )
    first, *rest = groups
    pairs = [pair for other in rest for pair in differences_of(first, groups[first], other, groups[other])]
    return {"groups": [describe_group(name, members) for name, members in groups.items()], "paired": pairs}


def label(run: RunView, keys: Sequence[str]) -> str:
    """Return the name of a group: the strategy and the settings in which the groups differ."""
    flat = {**flattened(run.settings), "strategy": run.strategy, "learners": run.learners}
    return " ".join(str(flat.get(k, "–")) if k == "strategy" else f"{k}={flat.get(k, '–')}" for k in keys)


def describe_group(name: str, members: Sequence[ComparedRun]) -> dict[str, Any]:
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
    """Return b minus a for every metric, over the seeds that both groups have."""
    rows = []
    seeds = sorted({e.seed for e in a} & {e.seed for e in b})
    keys = dict.fromkeys(k for e in [*a, *b] for k in e.metrics)
    for key in keys:
        by_seed = [(mean_of(a, seed, key), mean_of(b, seed, key)) for seed in seeds]
        pairs = [(x, y) for x, y in by_seed if x is not None and y is not None]
        if not pairs:
            continue
        row: dict[str, Any] = {"from": name_a, "to": name_b, "metric": key, "seeds": len(pairs)}
        over_speakers = paired_wer(a, b, seeds, key.removeprefix("wer ")) if key.startswith("wer ") else None
        if over_speakers is not None:
            row |= over_speakers
        else:
            row |= over_seeds([y - x for x, y in pairs])
            row["ratio"] = sum(y for _, y in pairs) / sum(x for x, _ in pairs) if key in ("seconds", "samples_per_s") else None
        rows.append(row)
    return rows


def mean_of(members: Sequence[ComparedRun], seed: int, key: str) -> float | None:
    """Return the mean over the runs with this seed, so that repeated runs count as one. None if there is none."""
    values = [e.metrics[key] for e in members if e.seed == seed and key in e.metrics]
    return statistics.mean(values) if values else None


def over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean difference with Student's 95 % interval. One seed has no interval."""
    mean, count = statistics.mean(values), len(values)
    half = None
    if count > 1:
        t = T_95[count - 2] if count - 2 < len(T_95) else T_95_NORMAL
        half = t * statistics.stdev(values) / math.sqrt(count)
    interval = {"low": None, "high": None} if half is None else {"low": mean - half, "high": mean + half}
    return {"difference": mean, **interval, "over": "seeds", "count": count}


def paired_wer(a: Sequence[ComparedRun], b: Sequence[ComparedRun], seeds: Sequence[int], name: str) -> dict[str, Any] | None:
    """Return the difference in word error rate over resampled speakers. None if the groups decoded different utterances."""
    groups = [[e.decoded[name] for e in group if e.seed in seeds and name in e.decoded] for group in (a, b)]
    if not groups[0] or not groups[1] or any(h.refs != groups[0][0].refs for group in groups for h in group):
        return None
    first = groups[0][0]
    pair = paired(first.refs, [h.hyps for h in groups[0]], [h.hyps for h in groups[1]], first.speakers)
    return {"difference": pair.difference, "low": pair.low, "high": pair.high, "over": pair.units, "count": pair.count}


# -- as text ---------------------------------------------------------------------------------------------------------------


def text_of(result: dict[str, Any]) -> str:
    """Return two tables: the groups, then the differences between the first group and each other group."""
    keys = list(dict.fromkeys(k for g in result["groups"] for k in g["metrics"]))
    rows = [["group", "seeds", *keys]]
    for g in result["groups"]:
        cells = [mean_and_range(g["metrics"][k]) if k in g["metrics"] else "-" for k in keys]
        rows.append([g["name"], str(len(g["seeds"])), *cells])
    lines = [*aligned(rows), ""]
    rows = [["difference", "metric", "mean", "95 % interval", "over"]]
    for p in result["paired"]:
        interval = "none (one pair)" if p["low"] is None else f"{signed(p['low'])} to {signed(p['high'])}"
        ratio = f" (x {p['ratio']:.2f})" if p.get("ratio") else ""
        unit = UNITS.get(p["metric"].split()[0], "")
        mean = f"{signed(p['difference'])} {unit}".rstrip() + ratio
        rows.append([f"{p['to']} minus {p['from']}", p["metric"], mean, interval, f"{p['count']} {p['over']}"])
    lines += aligned(rows)
    for g in result["groups"]:
        lines += [f"not finished: {run}" for run in g["unfinished"]]
    if not result["paired"]:
        lines.append("no differences: the groups have no seed in common")
    return "\n".join(lines)


def mean_and_range(metric: dict[str, Any]) -> str:
    mean = f"{metric['mean']:.4g}"
    return mean if metric["runs"] == 1 else f"{mean} ({metric['low']:.4g} - {metric['high']:.4g})"


def signed(x: float) -> str:
    return f"{x:+.4g}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines with aligned columns."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
