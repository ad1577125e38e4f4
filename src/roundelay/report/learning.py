"""The learning section: losses, validation metrics, learning rate and speed, against samples and against seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from html import escape

from roundelay.report import series
from roundelay.report.html import card, color, legend, table
from roundelay.report.run_reader import RunView
from roundelay.report.svg import Points, Series, line_chart, number

METRIC_TITLES = {
    "logprob": ("Validation log-probability per frame", "Higher is better: log-probability of the aligned state."),
    "loss": ("Validation loss", "Lower is better."),
    "accuracy": ("Validation accuracy", "Higher is better."),
}
SAMPLES, SECONDS = "samples", "seconds"


def against_both(
    runs: Sequence[RunView], points: Callable[[RunView, str], Points], heading: str, y_label: str, hint: str, figure: str,
    *, marks: bool = False, zero: bool = False,
) -> str:  # fmt: skip
    """Return a card with two charts of one metric: against samples and against seconds."""
    charts = []
    for field, x_label in (("position", SAMPLES), ("at", SECONDS)):
        rows = [Series(r.name, color(n), since_start(r, points(r, field), field), marks) for n, r in enumerate(runs)]
        charts.append(line_chart(rows, f"{heading} against {x_label}", x_label, y_label, zero=zero))
    return card(legend(runs) + f'<div class="pair">{"".join(charts)}</div>', hint, heading, figure) if any(charts) else ""


def since_start(run: RunView, points: Points, field: str) -> Points:
    """Return the points with times measured from the first step. Samples are unchanged."""
    begin = min((e["from"] for e in series.steps(run)), default=0.0) if field == "at" else 0.0
    return [(x - begin, y) for x, y in points]


def learning(runs: Sequence[RunView]) -> str:
    """Return the section."""
    hint = (
        "Against samples, the curves coincide if the strategies learn equally well. Against seconds, the curve that falls "
        "first is the fastest. A jump upwards means that the learning rate is too high."
        if len(runs) > 1
        else "A smooth fall that flattens out. A jump upwards means that the learning rate is too high; a flat line, too low."
    )
    parts = [against_both(runs, series.train_loss, "Training loss", "loss", hint, "train-loss")]
    names = dict.fromkeys(name for run in runs for e in run.evaluations for name in e["metrics"])
    if "logprob" in names:
        names.pop("loss", None)  # the negative of logprob
    for name in sorted(names, key=lambda n: [*METRIC_TITLES, n].index(n)):
        title, better = METRIC_TITLES.get(name, (f"Validation {name}", ""))
        hint = f"{better} Each mark is the average of the models of all learners, evaluated on the validation set."
        points = partial(series.validation, name)
        parts.append(against_both(runs, points, title, name, hint, f"validation-{name}", marks=True))
    parts.append(evaluations(runs))
    rates = [Series(r.name, color(n), series.learning_rate(r, "position")) for n, r in enumerate(runs)]
    speeds = [Series(r.name, color(n), since_start(r, series.throughput(r), "at")) for n, r in enumerate(runs)]
    rate = line_chart(rates, "learning rate against samples", SAMPLES, "learning rate", zero=True, log=False)
    speed = line_chart(speeds, "samples per second against time", SECONDS, "samples/s", zero=True, log=False)
    if rate or speed:
        hint = (
            "Left: the schedule, with warm-up and annealing, is the same for all strategies. Right: samples per second, summed "
            "over all learners. A dip is a checkpoint, an evaluation, or a machine that was busy."
        )
        parts.append(
            card(legend(runs) + f'<div class="pair">{rate}{speed}</div>', hint, "Learning rate and speed", "rate-speed")
        )
    return "".join(parts)


def evaluations(runs: Sequence[RunView]) -> str:
    """Return the validation metrics as tables."""
    tables = []
    for run in runs:
        if not run.evaluations:
            continue
        names = list(dict.fromkeys(name for e in run.evaluations for name in e["metrics"]))
        rows = [
            [
                number(e.get("position")) + (" (final)" if e.get("final") else ""),
                *(number(e["metrics"].get(n)) for n in names),
                number(e.get("spread")),
                number(e.get("effective_rate")),
            ]
            for e in run.evaluations
        ]
        tables.append(
            (f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else "")
            + table([SAMPLES, *map(escape, names), "spread", "effective rate"], rows)
        )
    return f"<details><summary>Validation metrics as numbers</summary>{''.join(tables)}</details>" if tables else ""
