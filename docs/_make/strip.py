"""Draw every step of two real runs from their events: the picture at the top of the README.

The runs write an event per step (log_every_s=0.01). Learner 1 is slowed down to a third of its speed:

    roundelay train blstm learners=2 straggler=1:3.0 log_every_s=0.01 epochs=0.08 task_options.samples=8192 \\
        eval_at_checkpoint=false strategy=sync run=runs/strip-sync             # and the same with strategy=adpsgd

    python docs/_make/strip.py record runs/strip-sync runs/strip-adpsgd        record docs/pictures/straggler.json
    python docs/_make/strip.py                                                 draw docs/pictures/straggler.svg from it
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from drawing import Timeline

FOLDER = Path(__file__).parents[1] / "pictures"
SECONDS = 5.0
WARM_STEPS = 4
KINDS = (("data", "wait"), ("compute", "gradient"), ("comm", "wait"), ("update", "update"))


def record(run: Path) -> dict[str, Any]:
    """Return the steps of every learner in the first SECONDS: their begin and their seconds by kind."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    steps = [e for e in events if e["event"] == "steps" and e["steps"] == 1]
    ranks = sorted({e["rank"] for e in steps})
    begin = max(next(e["time"] for e in steps if e["rank"] == r and e["step"] >= WARM_STEPS) for r in ranks)
    learners: list[list[dict[str, float]]] = [[] for _ in ranks]
    for e in steps:
        start = e["time"] - e["elapsed_s"] - begin
        if 0 <= start < SECONDS:
            learners[e["rank"]].append({"at": round(start, 3), **{k: round(e["seconds"].get(k, 0.0), 3) for k, _ in KINDS}})
    batch = next(e["samples"] for e in steps)
    return {"learners": learners, "batch": batch}


def draw(recorded: dict[str, Any]) -> Timeline:
    p = Timeline("two learners, one slowed to a third of its speed: all steps of five measured seconds", SECONDS + 0.9)
    p.ticks = [(t, f"{t} s") for t in range(int(SECONDS) + 1)]
    for name in ("sync", "adpsgd"):
        for rank, steps in enumerate(recorded[name]["learners"]):
            lane, done = p.lane(f"{name}, {rank}" + (" (slow)" if rank == 1 else "")), 0
            for step in steps:
                t = step["at"]
                for kind, style in KINDS:
                    t = p.bar(lane, t, min(t + step[kind], SECONDS), style)
                done += t <= SECONDS and step["at"] + sum(step[k] for k, _ in KINDS) <= SECONDS
            p.note(lane, SECONDS + 0.06, f"{done} gradients")
    return p


if __name__ == "__main__":
    store = FOLDER / "straggler.json"
    if sys.argv[1:2] == ["record"]:
        sync, adpsgd = (record(Path(name)) for name in sys.argv[2:4])
        store.write_text(json.dumps({"sync": sync, "adpsgd": adpsgd}) + "\n", encoding="utf-8")
    (FOLDER / "straggler.svg").write_text(draw(json.loads(store.read_text())).svg(), encoding="utf-8")
