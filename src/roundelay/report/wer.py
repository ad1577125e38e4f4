"""What was heard: word error rates with intervals, differences between systems, the worst confusions."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from roundelay.report.html import card, colour, signed, table
from roundelay.report.run_reader import RunView
from roundelay.report.svg_axes import number
from roundelay.report.svg_charts import intervals


def section(runs: Sequence[RunView]) -> str:
    heard = [run for run in runs if run.words.systems]
    if not heard:
        return ""
    several = len(heard) > 1
    sets = {r.get("set") for run in heard for r in run.words.systems}
    rows, marks = [], []
    for n, run in enumerate(runs):
        for r in run.words.systems:
            label = f"{r.get('name')} · {r.get('set')}"
            who = f"{run.name} {r.get('name') if len(sets) == 1 else label}" if several else label
            marks.append((who, colour(n), float(r["wer"]), float(r["low"]), float(r["high"])))
            kinds = " / ".join(number(r.get(k)) for k in ("substitutions", "insertions", "deletions"))
            row = [escape(label), f"{r['wer']:.2f}", f"{r['low']:.2f} – {r['high']:.2f}", kinds]
            rows.append([*([escape(run.name)] if several else []), *row, number(r.get("words")), number(r.get("speakers"))])
    head = [*(["run"] if several else []), "system · set", "WER %", "95 % interval", "sub / ins / del", "words", "speakers"]
    chart = intervals(marks, "word error rates", "word error rate, %")
    look = (
        "lower is better. The bars are 95 % intervals over resampled speakers: systems whose bars overlap widely may differ by "
        "chance alone; the differences below, speaker by speaker, say more."
    )
    layout = "" if several else ' class="pair uneven"'  # with the names of runs the table needs the whole width
    rates = table(head, rows, 2 if several else 1, stacks=True)
    inside = f'<div{layout}><div class="chart">{chart}</div><div>{rates}</div></div>'
    parts = [card(inside, look, "Word error rate", "wer")]
    more: list[str] = []
    pairs = [(run, p) for run in heard for p in run.words.paired]
    if pairs:
        rows = [
            [
                *([escape(run.name)] if several else []),
                f"{escape(str(p['to']))} minus {escape(str(p['from']))} · {escape(str(p['set']))}",
                signed(p["difference"]),
                f"{signed(p['low'])} to {signed(p['high'])}",
            ]
            for run, p in pairs
        ]
        head = [*(["run"] if several else []), "difference", "points", "95 % interval"]
        look = "an interval that does not hold 0 is a real difference; below 0, the first of the two is better."
        more.append(card(table(head, rows, 2 if several else 1), look, "Differences between systems", "wer-paired"))
    confusions = [(run, c) for run in heard for c in run.words.confusions]
    if confusions:
        rows = [
            [
                *([escape(run.name)] if several else []),
                escape(f"{c['name']} · {c['set']}"),
                escape(c["ref"] or "(nothing)"),
                escape(c["hyp"] or "(nothing)"),
                number(c["times"]),
            ]
            for run, c in confusions
        ]
        head = [*(["run"] if several else []), "system · set", "ref", "hyp", "times"]
        look = "words that sound alike are expected; one word that is always missed points at its pronunciation in the lexicon."
        more.append(card(table(head, rows, len(head) - 1), look, "Worst confusions", "confusions"))
    return f'{"".join(parts)}<div class="pair">{"".join(more)}</div>'
