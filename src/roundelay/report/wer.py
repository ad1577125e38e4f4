"""The word error section: rates with intervals, differences between systems, the most frequent confusions."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from roundelay.report.html import card, color, signed, table
from roundelay.report.run_reader import RunView
from roundelay.report.svg import interval_chart, number


def section(runs: Sequence[RunView]) -> str:
    """Return the section, or "" if no run was decoded."""
    decoded = [run for run in runs if run.words.systems]
    if not decoded:
        return ""
    several = len(decoded) > 1
    more = [differences(decoded, several), confusions(decoded, several)]
    return f'{rates(runs, several)}<div class="pair">{"".join(more)}</div>'


def run_column(run: RunView, several: bool) -> list[str]:
    return [escape(run.name)] if several else []


def rates(runs: Sequence[RunView], several: bool) -> str:
    """Return a chart and a table of the word error rates."""
    sets = {r.get("set") for run in runs for r in run.words.systems}
    rows, marks = [], []
    for n, run in enumerate(runs):
        for r in run.words.systems:
            label = f"{r.get('name')} · {r.get('set')}"
            name = f"{run.name} {r.get('name') if len(sets) == 1 else label}" if several else label
            marks.append((name, color(n), float(r["wer"]), float(r["low"]), float(r["high"])))
            kinds = " / ".join(number(r.get(k)) for k in ("substitutions", "insertions", "deletions"))
            row = [escape(label), f"{r['wer']:.2f}", f"{r['low']:.2f} – {r['high']:.2f}", kinds]
            rows.append([*run_column(run, several), *row, number(r.get("words")), number(r.get("speakers"))])
    head = [*["run"] * several, "system · set", "WER %", "95 % interval", "sub / ins / del", "words", "speakers"]
    chart = interval_chart(marks, "word error rates", "word error rate, %")
    hint = (
        "Lower is better. The bars are 95 % intervals over resampled speakers. Systems whose intervals overlap widely may "
        "differ by chance; the paired differences below are more precise."
    )
    layout = "" if several else ' class="pair uneven"'  # with run names the table needs the full width
    listing = table(head, rows, 1 + several, stacks=True)
    content = f'<div{layout}><div class="chart">{chart}</div><div>{listing}</div></div>'
    return card(content, hint, "Word error rate", "wer")


def differences(runs: Sequence[RunView], several: bool) -> str:
    """Return a table of paired comparisons, or ""."""
    rows = [
        [
            *run_column(run, several),
            f"{escape(str(p['to']))} minus {escape(str(p['from']))} · {escape(str(p['set']))}",
            signed(p["difference"]),
            f"{signed(p['low'])} to {signed(p['high'])}",
        ]
        for run in runs
        for p in run.words.paired
    ]
    if not rows:
        return ""
    head = [*["run"] * several, "difference", "points", "95 % interval"]
    hint = "If the interval does not contain 0, the difference is significant. Below 0, the first of the two systems is better."
    return card(table(head, rows, 1 + several), hint, "Differences between systems", "wer-paired")


def confusions(runs: Sequence[RunView], several: bool) -> str:
    """Return a table of the most frequent errors, or ""."""
    rows = [
        [
            *run_column(run, several),
            escape(f"{c['name']} · {c['set']}"),
            escape(c["ref"] or "(nothing)"),
            escape(c["hyp"] or "(nothing)"),
            number(c["count"]),
        ]
        for run in runs
        for c in run.words.confusions
    ]
    if not rows:
        return ""
    head = [*["run"] * several, "system · set", "reference", "hypothesis", "count"]
    hint = "Words that sound alike are expected. If a word is always wrong, check its pronunciation in the lexicon."
    return card(table(head, rows, len(head) - 1), hint, "Most frequent confusions", "confusions")
