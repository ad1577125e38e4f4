"""The provenance section: commands, environment, configuration and stages of a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from html import escape
from typing import Any

from roundelay.metrics.run_files import CONFIG
from roundelay.report.html import card, flattened, table
from roundelay.report.run_reader import RunView
from roundelay.report.svg import duration, number


def details(run: RunView) -> str:
    """Return the card of one run."""
    parts = [f"<p>{escape(str(run.path))}: {escape(run.state)}.</p>"]
    for rank, event in sorted(run.lost.items()):
        parts.append(f'<p class="warn">Rank {rank} was lost: {escape(str(event.get("why") or "unknown reason"))}.</p>')
    for stall in run.stalls[:5]:
        ranks = ", ".join(str(r) for r in stall.get("waiting_for") or [])
        parts.append(f'<p class="warn">All ranks waited {number(stall.get("waited_s"), 3)} s for rank {escape(ranks)}.</p>')
    parts.append("<h3>Commands to repeat the run</h3><pre>" + escape("\n".join(commands(run))) + "</pre>")
    environment = run.start.get("environment")
    if isinstance(environment, Mapping):
        start, batches = run.start, run.start.get("batches") or []
        rows = {
            "versions": ", ".join(f"{k} {v}" for k, v in (environment.get("versions") or {}).items()),
            "system": environment.get("system"),
            "processor": environment.get("processor"),
            "cores": environment.get("cores"),
            "memory": f"{environment['memory_gb']} GB" if environment.get("memory_gb") else None,
            "device": environment.get("device"),
            "threads per learner": environment.get("threads"),
            "machines": ", ".join(sorted(set(map(str, start.get("hosts") or [])))),
            "parameters": number(start["parameters"]) if start.get("parameters") else None,
            "global batch": f"{sum(batches)}{' = ' + ' + '.join(map(str, batches)) if 1 < len(batches) <= 8 else ''}",
        }
        parts.append(f"<h3>Environment</h3>{facts(rows)}")
    elif run.training is not None:
        parts.append('<p class="small">The run did not record its environment.</p>')
    if run.settings:
        flat = flattened(run.settings)
        parts.append(f"<details><summary>Configuration, {len(flat)} settings ({CONFIG})</summary>{facts(flat)}</details>")
    if run.stages:
        times = [[escape(name), duration(s)] for name, s in run.stages.items()]
        parts.append(f"<details><summary>Stages of the recipe</summary>{table(['stage', 'time'], times)}</details>")
    return card("".join(parts), heading=run.name, figure="details")


def commands(run: RunView) -> list[str]:
    """Return the recorded command, if there is one, and the command that repeats the training from its settings."""
    lines = []
    origin = run.command or run.start.get("environment") or {}
    argv = origin.get("command")
    if isinstance(argv, list) and len(argv) > 1:
        name = "roundelay" if "roundelay" in str(argv[0]) else f"python {shlex.quote(str(argv[0]))}"
        words = [str(a) for a in argv[1:]]
        if words[-1].startswith('run="') and any(w.startswith("run=") for w in words[:-1]):
            words.pop()  # added by the launcher for its learners
        lines += [f"cd {shlex.quote(str(origin.get('folder') or '.'))}", f"{name} {shlex.join(words)}"]
    if run.settings:
        if lines:
            lines.append(f"# {'only the network' if run.command else 'or'}, from the recorded settings:")
        lines.append(f"roundelay train {shlex.quote(str((run.training or run.path) / CONFIG))} run=runs/again resume=no")
    return lines or ["# not recorded"]


def facts(values: Mapping[str, Any]) -> str:
    """Return a definition list; empty values are left out."""
    rows = "".join(
        f"<div><dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd></div>" for k, v in values.items() if v not in (None, "")
    )
    return f'<dl class="facts">{rows}</dl>'
