"""A small corpus of features and alignments, written without audio, and archives of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from roundelay.recipes.pack import Packing, pack
from roundelay.speech.features.extract import FeatureOptions
from roundelay.speech.features.feature_store import DATA, FORMAT, INDEX, RANGES
from roundelay.speech.hmm.align import write_alignments

MELS, PDFS = 8, 5


def features(folder: Path, lengths: list[int], seed: int = 0, **options: Any) -> str:
    """Write a folder of features as `extract` does, with random bytes."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    rows = [[f"utt-{n:03d}", f"speaker-{n % 3}", frames] for n, frames in enumerate(lengths)]
    ranges = np.stack([rng.normal(-2, 0.3, (len(rows), MELS)), rng.uniform(0.01, 0.02, (len(rows), MELS))], axis=1)
    (folder / DATA).write_bytes(rng.integers(0, 256, (sum(lengths), MELS), np.uint8).tobytes())
    np.save(folder / RANGES, ranges.astype(np.float32))
    settings = asdict(FeatureOptions(**{"mels": MELS, **options}))
    (folder / INDEX).write_text(json.dumps({"format": FORMAT, "options": settings, "utterances": rows, "skipped": {}}))
    return str(folder)


def corpus(folder: Path, utterances: int = 30, **options: Any) -> dict[str, str]:
    """Write features and alignments of a training and a validation set; return the options of a task."""
    options_of_task = {}
    for name, prefix, count, seed in (("train", "", utterances, 1), ("dev", "valid_", 4, 2)):
        rng = np.random.default_rng([seed, 7])
        lengths = [int(n) for n in rng.integers(4, 90, count)]
        options_of_task[f"{prefix}features"] = features(folder / "features" / name, lengths, seed, **options)
        states = {f"utt-{n:03d}": rng.integers(0, PDFS, frames) for n, frames in enumerate(lengths)}
        write_alignments(folder / "alignments" / name, states, PDFS)
        options_of_task[f"{prefix}alignments"] = str(folder / "alignments" / name)
    return options_of_task


def packed(folder: Path, inputs: dict[str, str], *, shard_bytes: int = 1 << 20, **options: Any) -> Path:
    """Pack a corpus and return the folder of the archive."""
    settings = {"window": 21, "context": 6, "block": 8, **options}
    packing = Packing(features=inputs["features"], alignments=inputs["alignments"], **settings)
    return pack(packing, folder, progress="none", shard_bytes=shard_bytes).folder
