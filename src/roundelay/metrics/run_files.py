"""Names of the files in a run directory that the engine or a recipe writes and that reports read."""

from __future__ import annotations

from pathlib import Path

CONFIG = "config.toml"
"""Resolved settings of a training run."""
EVENTS = "events.jsonl"
"""Events of all ranks, one JSON object per line."""
MODEL = "model.safetensors"
"""The averaged model at the end of training."""
CHECKPOINTS = "ckpt"
TENSORBOARD = "tensorboard"
LOG = "log"
NETWORK = "network"
"""Training directory inside a recipe's run; later passes are called network-2, network-3 and so on."""
RESULT = "result.json"
"""Word error rates of a recipe."""
COMMAND = "command.json"
"""The command line that started a recipe, and its working directory."""
STAMPS = "stages"
"""Directory with one JSON file per finished stage of a recipe."""
REPORT = "report.html"


def training_dir(run: Path) -> Path | None:
    """Return the directory that holds the events: `run` itself or the last network of a recipe. None if there is none."""
    if (run / EVENTS).is_file():
        return run
    networks = [path for path in run.glob(f"{NETWORK}*") if (path / EVENTS).is_file()]
    numbers = {path: path.name.partition("-")[2] or "1" for path in networks}
    return max(networks, key=lambda path: int(numbers[path]) if numbers[path].isdecimal() else 0) if networks else None
