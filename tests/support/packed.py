"""A small corpus of features and alignments, written without any audio, and archives of it."""

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
    """A folder of features as `extract` writes it, with random bytes."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    rows = [[f"utt-{n:03d}", f"speaker-{n % 3}", frames] for n, frames in enumerate(lengths)]
    ranges = np.stack([random.normal(-2, 0.3, (len(rows), MELS)), random.uniform(0.01, 0.02, (len(rows), MELS))], axis=1)
    (folder / DATA).write_bytes(random.integers(0, 256, (sum(lengths), MELS), np.uint8).tobytes())
    np.save(folder / RANGES, ranges.astype(np.float32))
    told = asdict(FeatureOptions(**{"mels": MELS, **options}))
    (folder / INDEX).write_text(json.dumps({"format": FORMAT, "options": told, "utterances": rows, "skipped": {}}))
    return str(folder)


def corpus(folder: Path, utterances: int = 30, **options: Any) -> dict[str, str]:
    """Features and alignments of a training and a validation set, as the task takes them."""
    found = {}
    for name, prefix, count, seed in (("train", "", utterances, 1), ("dev", "valid_", 4, 2)):
        random = np.random.default_rng([seed, 7])
        lengths = [int(n) for n in random.integers(4, 90, count)]
        found[f"{prefix}features"] = features(folder / "features" / name, lengths, seed, **options)
        states = {f"utt-{n:03d}": random.integers(0, PDFS, frames) for n, frames in enumerate(lengths)}
        write_alignments(folder / "alignments" / name, states, PDFS)
        found[f"{prefix}alignments"] = str(folder / "alignments" / name)
    return found


def packed(folder: Path, told: dict[str, str], *, shard_bytes: int = 1 << 20, **options: Any) -> Path:
    """An archive of that corpus."""
    wanted = {"window": 21, "context": 6, "block": 8, **options}
    made = Packing(features=told["features"], alignments=told["alignments"], **wanted)
    return pack(made, folder, progress="none", shard_bytes=shard_bytes).folder
