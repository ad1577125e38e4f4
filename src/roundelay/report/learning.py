"""How the runs learn: losses, held-out metrics, rate and speed, against samples and against seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from html import escape

from roundelay.report import series
from roundelay.report.html import card, colour, legend, table
from roundelay.report.run_reader import RunView
from roundelay.report.svg_axes import number
from roundelay.report.svg_charts import Series, lines

FIGURE_NAMES = {
    "logprob": ("Held-out log-probability per frame", "Higher is better: how sure the average model is of the right state."),
    "loss": ("Held-out loss", "Lower is better."),
    "accuracy": ("Held-out accuracy", "Higher is better: the share that is right."),
}
SAMPLES, SECONDS = "samples", "seconds"


def against_both(
    runs: Sequence[RunView], points: Callable[[RunView, str], series.Points], heading: str, y_label: str, look: str, figure: str,
    *, marks: bool = False, zero: bool = False,
) -> str:  # fmt: skip
    """One figure against samples and once more against seconds, on the same scale of values."""
    drawn = []
    for field, x_label in (("position", SAMPLES), ("at", SECONDS)):
        rows = [Series(r.name, colour(n), since_start(r, points(r, field), field), marks) for n, r in enumerate(runs)]
        drawn.append(lines(rows, f"{heading} against {x_label}", x_label, y_label, zero=zero))
    return card(legend(runs) + f'<div class="pair">{"".join(drawn)}</div>', look, heading, figure) if any(drawn) else ""


def since_start(run: RunView, points: series.Points, field: str) -> series.Points:
    begin = min((e["from"] for e in series.steps(run)), default=0.0) if field == "at" else 0.0
    return [(x - begin, y) for x, y in points]


def learning(runs: Sequence[RunView]) -> str:
    look = (
        "against samples, curves lie on one another if the strategies learn equally well; against seconds, the one that falls "
        "first is the faster. A jump upwards means that the rate is too high."
        if len(runs) > 1
        else "a smooth fall that flattens out. A jump upwards means that the rate is too high; a flat line, too low."
    )
    parts = [against_both(runs, series.train_loss, "Training loss", "loss", look, "train-loss")]
    names = dict.fromkeys(name for run in runs for e in run.evaluations for name in e["metrics"])
    if "logprob" in names:
        names.pop("loss", None)  # the same figure with the other sign
    for name in sorted(names, key=lambda n: [*FIGURE_NAMES, n].index(n)):
        title, better = FIGURE_NAMES.get(name, (f"Held-out {name}", ""))
        look = f"{better} Each mark is the average of all learners' models, judged on data that nobody trained on."
        points = partial(series.held_out, name)
        parts.append(against_both(runs, points, title, name, look, f"held-out-{name}", marks=True))
    parts.append(evaluations(runs))
    rows = [Series(r.name, colour(n), series.learning_rate(r, "position")) for n, r in enumerate(runs)]
    speed = [Series(r.name, colour(n), since_start(r, series.throughput(r), "at")) for n, r in enumerate(runs)]
    rate = lines(rows, "learning rate against samples", SAMPLES, "rate", zero=True, log=False)
    fast = lines(speed, "samples per second against time", SECONDS, "samples/s", zero=True, log=False)
    if rate or fast:
        look = (
            "first, the schedule: warm-up, then annealing, the same for every strategy; then, how many samples all learners "
            "together work through per second. A dip is a save, an evaluation, or a machine that was busy."
        )
        parts.append(
            card(legend(runs) + f'<div class="pair">{rate}{fast}</div>', look, "Learning rate and speed", "rate-speed")
        )
    return "".join(parts)


def evaluations(runs: Sequence[RunView]) -> str:
    """The held-out metrics as numbers."""
    found = []
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
        found.append(
            (f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else "")
            + table([SAMPLES, *map(escape, names), "spread", "effective rate"], rows)
        )
    return f"<details><summary>Held-out metrics as numbers</summary>{''.join(found)}</details>" if found else ""
