"""Extract the features of a corpus: log-mel filterbanks, normalized per speaker, one byte per value on disk.

`extract` reads every recording once and writes a folder that `FeatureStore` maps into memory. Deltas are computed when the
features are read.
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
from roundelay.speech.corpora.utterance import Corpus, Utterance
from roundelay.speech.features.audio import read_audio
from roundelay.speech.features.fbank import frame_count, log_mel
from roundelay.speech.features.feature_store import DATA, FORMAT, INDEX, RANGES, FeatureStore

SHORTEST_FRAMES = 3
LONGEST_S = 120.0
MIN_VARIANCE = 1e-4


@dataclass(frozen=True)
class FeatureOptions:
    """Options of feature extraction.

    rate      samples per second of the audio
    mels      number of filters between low_hz and high_hz
    deltas    orders of delta features: 0, 1 or 2
    cmvn      mean and variance normalization: speaker, utterance or none
    low_hz    lower edge of the first filter
    high_hz   upper edge of the last filter; 0 or less is an offset from half the rate
    """

    rate: int = 8000
    mels: int = 40
    deltas: int = 2
    cmvn: Literal["speaker", "utterance", "none"] = "speaker"
    low_hz: float = 64.0
    high_hz: float = -200.0

    def __post_init__(self) -> None:
        top = self.high_hz if self.high_hz > 0 else self.rate / 2 + self.high_hz
        if self.rate < 1000:
            raise UsageError(f"rate must be at least 1000 (got {self.rate})", where="features")
        if not 0 <= self.low_hz < top <= self.rate / 2:
            raise UsageError(
                f"filters must satisfy 0 <= low_hz < high_hz <= rate / 2 (got {self.low_hz} Hz to {top} Hz, rate {self.rate})",
                where="features",
            )
        if self.mels < 1:
            raise UsageError(f"mels must be at least 1 (got {self.mels})", where="features")
        if not 0 <= self.deltas <= 2:
            raise UsageError(f"deltas must be 0, 1 or 2 (got {self.deltas})", where="features")
        if self.cmvn not in ("speaker", "utterance", "none"):
            raise UsageError(f"cmvn must be speaker, utterance or none (got '{self.cmvn}')", where="features")


@dataclass
class _QuantizedUtterance:
    """One utterance: bytes, minimum and step of each filter, sums for normalization. Too short utterances have no bytes."""

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
    """Write the features of a corpus to `folder` and open them.

    Utterances with fewer than 3 frames are left out and listed in `store.skipped`. Raises DataError if audio is unreadable,
    empty, longer than `longest_s`, or of another rate and `resample` is not set.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX).unlink(missing_ok=True)  # an interrupted extraction must not leave a complete-looking folder
    work = partial(_quantized, options=options, resample=resample, longest_s=longest_s)
    utterances: list[Utterance] = []
    quantized: list[_QuantizedUtterance] = []
    skipped: dict[str, str] = {}
    with (folder / DATA).open("wb") as out:
        results = process_map(work, corpus.utterances, jobs=jobs, progress=progress, what="features")
        for utterance, result in zip(corpus.utterances, results, strict=True):
            if result.frames < SHORTEST_FRAMES:
                skipped[utterance.id] = f"too short: {result.frames} frames, {SHORTEST_FRAMES} are needed"
                continue
            out.write(result.data.tobytes())
            result.data = np.empty(0, np.uint8)
            utterances.append(utterance)
            quantized.append(result)
    if not utterances:
        raise DataError("every utterance is too short for features", where=str(corpus.folder))
    ranges = _normalized_ranges(utterances, quantized, options.cmvn)
    np.save(folder / RANGES, ranges, allow_pickle=False)
    index = {
        "format": FORMAT,
        "options": asdict(options),
        "utterances": [[u.id, u.speaker, q.frames] for u, q in zip(utterances, quantized, strict=True)],
        "skipped": skipped,
    }
    part = folder / (INDEX + ".part")
    part.write_text(json.dumps(index), encoding="utf-8")
    part.replace(folder / INDEX)
    return FeatureStore.open(folder)


def _quantized(utterance: Utterance, options: FeatureOptions, resample: bool, longest_s: float) -> _QuantizedUtterance:
    samples = read_audio(utterance, options.rate, resample=resample, longest_s=longest_s)
    frames = frame_count(len(samples), options.rate)
    if frames < SHORTEST_FRAMES:
        empty = np.zeros(0, np.float32)
        return _QuantizedUtterance(frames, empty, empty, empty, empty, empty)
    x = log_mel(samples, options.rate, options.mels, options.low_hz, options.high_hz)
    low, high = x.min(axis=0), x.max(axis=0)
    step = np.maximum((high - low) / np.float32(255), np.float32(1e-8))
    data = np.rint((x - low) / step).astype(np.uint8)
    total, squares = x.sum(axis=0, dtype=np.float64), np.square(x, dtype=np.float64).sum(axis=0)
    return _QuantizedUtterance(frames, data, low, step, total, squares)


def _normalized_ranges(utterances: Sequence[Utterance], quantized: Sequence[_QuantizedUtterance], cmvn: str) -> np.ndarray:
    """Return low and step of the bytes, float32 [utterances, 2, mels], such that low + byte * step is normalized."""
    groups: dict[str, list[int]] = {}
    for number, utterance in enumerate(utterances):
        groups.setdefault(utterance.speaker if cmvn == "speaker" else utterance.id, []).append(number)
    ranges = np.stack([np.stack([q.low, q.step]) for q in quantized])
    if cmvn == "none":
        return ranges
    for members in groups.values():
        frames = sum(quantized[n].frames for n in members)
        mean = np.sum([quantized[n].total for n in members], axis=0) / frames
        variance = np.sum([quantized[n].squares for n in members], axis=0) / frames - mean**2
        scale = 1.0 / np.sqrt(np.maximum(variance, MIN_VARIANCE))
        ranges[members, 0] = (ranges[members, 0] - mean) * scale
        ranges[members, 1] = ranges[members, 1] * scale
    return ranges
