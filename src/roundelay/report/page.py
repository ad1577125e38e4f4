"""The report page: one HTML file with its style sheet and charts. It needs neither a network nor scripts."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from roundelay.errors import UsageError, reading
from roundelay.report import learning, mixing, provenance, time_split, wer
from roundelay.report.html import card, flattened, table
from roundelay.report.run_reader import RunView, WerResult, read_run
from roundelay.report.svg import duration, number

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""The page loads nothing and runs no script, whatever the names in its run say."""
INCIDENTAL_SETTINGS = {
    "run", "resume", "progress", "bind_address", "store_port", "tensorboard", "keep_checkpoints", "log_every_s", "timeout_s",
    "task_options.seed",
}  # fmt: skip
"""Settings that are not listed as a difference between runs."""


def write_report(runs: Sequence[str | Path], out: str | Path, extra: Mapping[Path, WerResult] | None = None) -> Path:
    """Write one page about the run directories and return its path. Raise UsageError if a run or `out` is unusable.

    extra   word error rates by run directory that replace those of result.json
    """
    if not runs:
        raise UsageError("a report needs at least one run", where="RUN", hint="name a run directory")
    paths = [Path(run) for run in runs]
    words = {path.resolve(): result for path, result in (extra or {}).items()}
    views = [
        read_run(path, name, words.get(path.resolve())) for path, name in zip(paths, names_of(paths), strict=True)
    ]  # fmt: skip
    out = Path(out)
    with reading("the run", ", ".join(map(str, paths)), "check the files of the run directory"):
        text = page(views)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.with_name(f".{out.name}.{os.getpid()}")
        partial.write_text(text, encoding="utf-8", errors="replace")
        partial.replace(out)
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise UsageError(f"writing the page failed: {cause}", where=str(out), hint="choose another --out") from error
    return out


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return the shortest suffix of each path that is unique; `network` alone is not informative."""
    whole = [p.resolve().parts for p in paths]
    names = []
    for parts in whole:
        length = 2 if parts[-1].startswith("network") and len(parts) > 2 else 1
        while (
            length < len(parts) and sum(other[-length:] == parts[-length:] for other in whole) > 1 and whole.count(parts) == 1
        ):
            length += 1
        names.append("/".join(parts[-length:]))
    return names


def page(runs: Sequence[RunView]) -> str:
    """Return the HTML text."""
    title = f"{runs[0].name}: {runs[0].strategy}" if len(runs) == 1 else f"{len(runs)} runs compared"
    style = resources.files("roundelay.report").joinpath("page.css").read_text(encoding="utf-8")
    bodies = [
        ("words", "Word errors", wer.section(runs)),
        ("learning", "Learning", learning.learning(runs)),
        ("time", "Time", time_split.time_split(runs)),
        ("asynchrony", "Asynchrony", time_split.asynchrony(runs)),
        ("mixing", "Mixing", mixing.section(runs) or unknown_mixing(runs)),
        ("provenance", "Provenance", "".join(provenance.details(run) for run in runs)),
    ]
    shown = [(at, name, body) for at, name, body in bodies if body]
    menu = "".join(f'<a href="#{at}">{name}</a>' for at, name, _ in shown)
    main = "".join(f'<section id="{at}"><h2>{name}</h2>{body}</section>' for at, name, body in shown)
    today = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)} · Roundelay</title><style>\n{style}</style></head>\n<body>"
        f'<header><p class="small">Roundelay report · {today}</p><h1>{escape(title)}</h1>'
        f"{summary(runs)}<nav>{menu}</nav></header>\n"
        f"<main>{main}</main></body></html>\n"
    )


def summary(runs: Sequence[RunView]) -> str:
    return tiles(runs[0]) if len(runs) == 1 else comparison(runs)


def tiles(run: RunView) -> str:
    """Return the main metrics of one run."""
    learners = f"{run.learners} learner{'s' * (run.learners != 1)}"
    rows = [
        ("strategy", escape(run.strategy or "–"), learners),
        ("time", duration(run.seconds), "including evaluation and checkpoints"),
        ("speed", f"{number(run.samples_per_s, 3)}", f"samples/s; {number(run.samples)} samples"),
    ]
    for name in ("logprob", "accuracy") if "logprob" in run.final else ("loss", "accuracy"):
        if name in run.final:
            rows.append(
                (f"validation {name}", number(run.final[name]), "per frame" if name == "logprob" else "of the average model")
            )
    wer = run.wer()
    if wer is not None:
        rows.append(
            ("word error rate", f"{wer['wer']:.2f} %", f"{wer['low']:.2f} to {wer['high']:.2f}; {escape(str(wer['set']))}")
        )
    shown = "".join(
        f'<div class="tile"><div class="what">{what}</div><div class="figure">{figure}</div><div class="more">{more}</div>'
        "</div>"
        for what, figure, more in rows
    )
    state = "" if run.state == "finished" else f'<p class="warn">This run is {escape(run.state)}.</p>'
    return f'{state}<div class="tiles" data-figure="summary">{shown}</div>'


def comparison(runs: Sequence[RunView]) -> str:
    """Return all runs in one table, with the settings in which they differ."""
    differing = differences(runs)
    names = [n for n in ("logprob", "loss", "accuracy") if any(n in r.final for r in runs)]
    if "logprob" in names and "loss" in names:
        names.remove("loss")
    decoded = any(r.wer() for r in runs)
    head = ["run", "strategy", *map(escape, differing), "learners", "seconds", "samples/s", *(f"validation {n}" for n in names)]
    head += ["WER % (95 % interval)"] if decoded else []
    rows = []
    for run in runs:
        flat = flattened(run.settings)
        cells = [escape(run.name), escape(run.strategy or "–"), *(escape(str(flat.get(k, "–"))) for k in differing)]
        cells += [number(run.learners), f"{run.seconds:.1f}" if run.seconds else "–", number(run.samples_per_s, 3)]
        cells += [number(run.final.get(n)) for n in names]
        if decoded:
            wer = run.wer()
            cells.append(f"{wer['wer']:.2f} ({wer['low']:.2f} – {wer['high']:.2f})" if wer else "–")
        if run.state != "finished":
            cells[0] += f'<br><span class="warn small">{escape(run.state)}</span>'
        rows.append(cells)
    hint = "Seconds and samples/s show which run is faster; the validation metrics, whether its model is as good at the end."
    return card(table(head, rows, 2, stacks=True), hint, figure="summary")


def differences(runs: Sequence[RunView], most: int = 6) -> list[str]:
    """Return at most `most` settings that differ between the runs, except strategy and learners."""
    flat = [flattened(run.settings) for run in runs if run.settings]
    keys = dict.fromkeys(k for settings in flat for k in settings)
    differing = []
    for key in keys:
        values: list[Any] = [settings.get(key) for settings in flat]
        path = any(isinstance(v, str) and "/" in v for v in values)
        if key not in INCIDENTAL_SETTINGS | {"strategy", "learners"} and not path and any(v != values[0] for v in values):
            differing.append(key)
    return differing[:most]


def unknown_mixing(runs: Sequence[RunView]) -> str:
    """Return a note for runs that did not record their topology."""
    if all(run.learners < 2 for run in runs):
        return ""
    return '<p class="small">The events do not record which learners average with each other.</p>'
