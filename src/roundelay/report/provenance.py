"""How a run was made: its commands, environment, configuration and stages."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from html import escape
from typing import Any

from roundelay.report.html import card, flattened, table
from roundelay.report.run_reader import RunView
from roundelay.report.svg_axes import duration, number


def details(run: RunView) -> str:
    """Configuration, environment, commands of one run."""
    parts = [f"<p>{escape(str(run.path))}: {escape(run.state)}.</p>"]
    for rank, event in sorted(run.lost.items()):
        parts.append(f'<p class="warn">Rank {rank} was lost: {escape(str(event.get("why") or "no reason was recorded"))}.</p>')
    for stall in run.stalls[:5]:
        ranks = ", ".join(str(r) for r in stall.get("waiting_for") or [])
        parts.append(f'<p class="warn">All waited {number(stall.get("waited_s"), 3)} s for rank {escape(ranks)}.</p>')
    parts.append("<h3>The command to repeat it</h3><pre>" + escape("\n".join(commands(run))) + "</pre>")
    about = run.start.get("environment")
    if isinstance(about, Mapping):
        start, batches = run.start, run.start.get("batches") or []
        known = {
            "versions": ", ".join(f"{k} {v}" for k, v in (about.get("versions") or {}).items()),
            "system": about.get("system"),
            "processor": about.get("processor"),
            "cores": about.get("cores"),
            "memory": f"{about['memory_gb']} GB" if about.get("memory_gb") else None,
            "device": about.get("device"),
            "threads per learner": about.get("threads"),
            "machines": ", ".join(sorted(set(map(str, start.get("hosts") or [])))),
            "parameters": number(start["parameters"]) if start.get("parameters") else None,
            "global batch": f"{sum(batches)}{' = ' + ' + '.join(map(str, batches)) if 1 < len(batches) <= 8 else ''}",
        }
        parts.append(f"<h3>Environment</h3>{facts(known)}")
    elif run.engine is not None:
        parts.append('<p class="small">This run did not record its environment: it was made by an older version.</p>')
    if run.settings:
        flat = flattened(run.settings)
        parts.append(f"<details><summary>Configuration, {len(flat)} settings (config.toml)</summary>{facts(flat)}</details>")
    if run.stages:
        rows = [[escape(name), duration(s)] for name, s in run.stages.items()]
        parts.append(f"<details><summary>Stages of the recipe</summary>{table(['stage', 'time'], rows)}</details>")
    return card("".join(parts), heading=run.name, figure="details")


def commands(run: RunView) -> list[str]:
    """As it was typed, where that is known; and from the settings that the run keeps."""
    found = []
    about = run.typed or run.start.get("environment") or {}
    typed = about.get("command")
    if isinstance(typed, list) and len(typed) > 1:
        name = "roundelay" if "roundelay" in str(typed[0]) else f"python {shlex.quote(str(typed[0]))}"
        words = [str(a) for a in typed[1:]]
        if words[-1].startswith('run="') and any(w.startswith("run=") for w in words[:-1]):
            words.pop()  # what the command has handed to its learners
        arguments = shlex.join(words)
        found += [f"cd {shlex.quote(str(about.get('folder') or '.'))}", f"{name} {arguments}"]
    if run.settings:
        if found:
            found.append(f"# {'the network alone' if run.typed else 'or'}, from the settings that the run keeps:")
        found.append(f"roundelay train {shlex.quote(str((run.engine or run.path) / 'config.toml'))} run=runs/again resume=no")
    return found or ["# not recorded"]


def facts(known: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<div><dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd></div>" for k, v in known.items() if v not in (None, "")
    )
    return f'<dl class="facts">{rows}</dl>'
