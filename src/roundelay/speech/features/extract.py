"""Features of a corpus: log-mel filterbanks, normalised per speaker, with deltas; one byte per value on disk.

`extract` reads every recording once and writes a folder that `FeatureStore` maps into memory; `from_spec` opens such a folder,
Kaldi's feats.scp, or several of either side by side ("feats+fmllr.scp+ivectors.scp").
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from roundelay.core.process_map import process_map
from roundelay.errors import DataError, UsageError
from roundelay.speech.corpora.data_dir import Corpus, Utterance
from roundelay.speech.features.audio import read_audio
from roundelay.speech.features.fbank import frame_count, log_mel
from roundelay.speech.features.feature_store import (
    DATA,
    FORMAT,
    INDEX,
    RANGES,
    FeatureStore,
)

SHORTEST_FRAMES = 3
LONGEST_S = 120.0
LEAST_VARIANCE = 1e-4


@dataclass(frozen=True)
class FeatureOptions:
    """rate     samples per second of the audio
    mels        filters between low_hz and high_hz (zero or less: below half the rate)
    deltas      0, 1 or 2 orders of slopes
    cmvn        mean and variance taken out per speaker, per utterance, or not at all
    """

    rate: int = 8000
    mels: int = 40
    deltas: int = 2
    cmvn: Literal["speaker", "utterance", "none"] = "speaker"
    low_hz: float = 64.0
    high_hz: float = -200.0

    def __post_init__(self) -> None:
        top = self.high_hz if self.high_hz > 0 else self.rate / 2 + self.high_hz
        if self.rate < 1000 or not 0 <= self.low_hz < top <= self.rate / 2:
            raise UsageError(f"filters from {self.low_hz} Hz to {top} Hz at {self.rate} samples per second", where="features")
        if self.mels < 1 or not 0 <= self.deltas <= 2:
            raise UsageError(
                f"{self.mels} filters with {self.deltas} orders of deltas", where="features", hint="deltas: 0, 1 or 2"
            )
        if self.cmvn not in ("speaker", "utterance", "none"):
            raise UsageError(f"cmvn cannot be '{self.cmvn}'", where="features", hint="choose one of: speaker, utterance, none")


@dataclass
class _Made:
    """One utterance: bytes, the least value and the step of each filter, sums for the speaker; no bytes if it is too short."""

    frames: int
    data: np.ndarray
    low: np.ndarray
    step: np.ndarray
    total: np.ndarray
    squares: np.ndarray


def extract(
    corpus: Corpus,
    folder: Path,
    options: FeatureOptions,
    *,
    jobs: int = 1,
    resample: bool = False,
    progress: str = "auto",
    longest_s: float = LONGEST_S,
) -> FeatureStore:
    """Writes the features of a corpus; utterances too short for a frame are left out and named in `store.skipped`.

    Audio that is corrupt, empty, of another rate (without `resample`) or longer than `longest_s` is an error.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX).unlink(missing_ok=True)  # an interrupted extraction leaves no folder that looks whole
    work = partial(_features, options=options, resample=resample, longest_s=longest_s)
    kept: list[Utterance] = []
    made: list[_Made] = []
    skipped: dict[str, str] = {}
    with (folder / DATA).open("wb") as out:
        results = process_map(work, corpus.utterances, jobs=jobs, progress=progress, what="features")
        for utterance, found in zip(corpus.utterances, results, strict=True):
            if found.frames < SHORTEST_FRAMES:
                skipped[utterance.id] = f"too short: {found.frames} frames, {SHORTEST_FRAMES} are needed"
                continue
            out.write(found.data.tobytes())
            found.data = np.empty(0, np.uint8)
            kept.append(utterance)
            made.append(found)
    if not kept:
        raise DataError("every utterance is too short for features", where=str(corpus.folder))
    ranges = _normalised_ranges(kept, made, options.cmvn)
    np.save(folder / RANGES, ranges, allow_pickle=False)
    index = {
        "format": FORMAT,
        "options": asdict(options),
        "utterances": [[u.id, u.speaker, m.frames] for u, m in zip(kept, made, strict=True)],
        "skipped": skipped,
    }
    part = folder / (INDEX + ".part")
    part.write_text(json.dumps(index), encoding="utf-8")
    part.replace(folder / INDEX)
    return FeatureStore.open(folder)


def _features(utterance: Utterance, options: FeatureOptions, resample: bool, longest_s: float) -> _Made:
    samples = read_audio(utterance, options.rate, resample=resample, longest_s=longest_s)
    frames = frame_count(len(samples), options.rate)
    if frames < SHORTEST_FRAMES:
        nothing = np.zeros(0, np.float32)
        return _Made(frames, nothing, nothing, nothing, nothing, nothing)
    x = log_mel(samples, options.rate, options.mels, options.low_hz, options.high_hz)
    low, high = x.min(axis=0), x.max(axis=0)
    step = np.maximum((high - low) / np.float32(255), np.float32(1e-8))
    data = np.rint((x - low) / step).astype(np.uint8)
    return _Made(frames, data, low, step, x.sum(axis=0, dtype=np.float64), np.square(x, dtype=np.float64).sum(axis=0))


def _normalised_ranges(kept: Sequence[Utterance], made: Sequence[_Made], cmvn: str) -> np.ndarray:
    """float32 [utterances, 2, mels]: low and step of the bytes, so that low + byte * step is already normalised."""
    groups: dict[str, list[int]] = {}
    for number, utterance in enumerate(kept):
        groups.setdefault(utterance.speaker if cmvn == "speaker" else utterance.id, []).append(number)
    ranges = np.stack([np.stack([m.low, m.step]) for m in made])
    if cmvn == "none":
        return ranges
    for members in groups.values():
        frames = sum(made[n].frames for n in members)
        mean = np.sum([made[n].total for n in members], axis=0) / frames
        variance = np.sum([made[n].squares for n in members], axis=0) / frames - mean**2
        scale = 1.0 / np.sqrt(np.maximum(variance, LEAST_VARIANCE))
        ranges[members, 0] = (ranges[members, 0] - mean) * scale
        ranges[members, 1] = ranges[members, 1] * scale
    return ranges
