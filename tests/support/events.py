"""Run directories with chosen events, as runs that ended in different ways leave them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BEGAN = 1_700_000_000.0


def steps(rank: int, second: float, position: int, **more: Any) -> dict[str, Any]:
    """Return the event of one second in which a learner computes half of the time."""
    return {
        "event": "steps", "time": BEGAN + second, "rank": rank, "step": 10, "steps": 10, "samples": 100, "samples_per_s": 100.0,
        "loss": 2.0 / second, "lr": 0.1, "position": position, "seconds": {"compute": 0.5, "comm": 0.25}, "elapsed_s": 1.0,
        "staleness": {"0": 8, "3": 2}, "exchanges": 5, "bytes": 0, "pair_distance": 0.01 / second, **more,
    }  # fmt: skip


def evaluation(second: float, position: int, final: bool = False, **metrics: float) -> dict[str, Any]:
    event = {"event": "evaluation", "time": BEGAN + second, "rank": 0, "position": position, "metrics": metrics, "final": final}
    return event if final else {**event, "spread": 0.05, "effective_rate": 0.9}


def start(learners: int, first: int = 0, second: float = 0.0, **more: Any) -> dict[str, Any]:
    ring = [[i, i + 1, 0.25] for i in range(learners - 1)] + ([[0, learners - 1, 0.25]] if learners > 2 else [])
    mixing = {"kind": "exchanges", "topology": "ring", "nodes": list(range(learners)), "machines": [list(range(learners))],
              "weights": ring, "gap": 0.1234, "period": 2, "rounds_to_1_percent": 17}  # fmt: skip
    return {
        "event": "start", "time": BEGAN + second, "rank": 0, "strategy": "adpsgd", "learners": learners, "first": first,
        "total": 1000, "mixing": mixing, "environment": {"versions": {"torch": "9.9.9"}, "cores": 3},
        "hosts": ["here"] * learners, **more,
    }  # fmt: skip


def whole(learners: int, seconds: int = 4) -> list[dict[str, Any]]:
    """Return the events of a run from start to end."""
    events = [start(learners)]
    for second in range(1, seconds + 1):
        events += [steps(rank, float(second), 100 * (learners * (second - 1) + rank)) for rank in range(learners)]
        events.append(evaluation(second, 100 * learners * second, loss=1.0 / second, accuracy=0.5))
    events.append(evaluation(seconds + 0.1, 100 * learners * seconds, final=True, loss=0.2345, accuracy=0.8765))
    events.append({"event": "run", "time": BEGAN + seconds + 0.2, "rank": 0, "metrics": {"loss": 0.2345}})
    return events


def write_run(
    folder: Path, events: list[dict[str, Any]], cut: str = "", settings: str = 'strategy = "adpsgd"\nseed = 0\n'
) -> Path:
    """Write a run directory with these events; `cut` is the incomplete last line that a crash leaves."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(settings)
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events) + cut)
    return folder


def write_recipe(folder: Path, events: list[dict[str, Any]], errors: int = 2, settings: str = "") -> Path:
    """Write the run directory of a recipe: a training run as its network, and ten words of each of four speakers."""
    write_run(folder / "network", events, settings=settings or 'strategy = "adpsgd"\nseed = 0\n')
    reference = {f"s{speaker}-{n}": ["yes", "no"][n % 2] for speaker in range(4) for n in range(10)}
    data, decoded = folder / "data" / "test", folder / "decode" / "lstm"
    data.mkdir(parents=True)
    decoded.mkdir(parents=True)
    (folder / "data" / "sets.json").write_text('{"test": ["test"]}')
    (data / "text").write_text("".join(f"{u} {word}\n" for u, word in reference.items()))
    (data / "utt2spk").write_text("".join(f"{u} {u[:2]}\n" for u in reference))
    wrong = [u for u, word in reference.items() if word == "yes"][:errors]
    (decoded / "test.txt").write_text("".join(f"{u} {'yeast' if u in wrong else word}\n" for u, word in reference.items()))
    row = {"name": "lstm", "set": "test", "wer": 2.5 * errors, "low": 0.0, "high": 10.0, "words": 40, "speakers": 4}
    (folder / "result.json").write_text(json.dumps({"systems": [row], "paired": []}))
    return folder
