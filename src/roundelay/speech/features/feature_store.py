"""Open features on disk: folders written by `extract`, Kaldi's feats.scp, and several of them pasted.

All have the same interface: `ids`, `dim`, `frames(id)`, `speaker(id)`, `[id]` -> float32 [frames, dim]. A specification names
them:

    exp/feats                a folder of features, or of transforms that adapt other features to their speakers
    feats.scp                a Kaldi list
    feats.scp[cmvn,deltas]   a Kaldi list, normalized by the cmvn.scp in its folder, with deltas
    a+b+c                    streams pasted frame by frame, as Kaldi's paste-feats does

In pasted streams, a stream with one row (i-vectors) applies to the whole utterance. A stream with one row for ten frames
(online i-vectors) applies to ten frames each. Other streams may differ by two frames and are cut to the shortest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from roundelay.errors import PARSE_ERRORS, DataError, UsageError, reading
from roundelay.speech import memory_guard
from roundelay.speech.features.fbank import DELTA_WINDOW, add_deltas, context_deltas
from roundelay.speech.features.kaldi_ark import read_matrices
from roundelay.speech.hmm import adaptation
from roundelay.speech.hmm.adaptation import AdaptedFeatures

FORMAT = 1
INDEX, DATA, RANGES = "features.json", "features.u8", "ranges.npy"
HELD_FRAMES = 10
"""Frames that one row of online i-vectors applies to."""
LENGTH_TOLERANCE = 2
"""Frames by which pasted streams may differ."""


class Stream(Protocol):
    """Features by utterance."""

    ids: list[str]
    dim: int
    name: str

    def frames(self, id: str) -> int: ...

    def speaker(self, id: str) -> str: ...

    def static(self, id: str) -> np.ndarray: ...

    def __getitem__(self, id: str) -> np.ndarray: ...


class UtteranceFeatures:
    """Base of all features on disk: ids, frame counts and speakers of the utterances.

    `speakers` may lack utterances; each of these is then its own speaker.
    """

    def __init__(self, name: str, frames: Mapping[str, int], speakers: Mapping[str, str]) -> None:
        self.name = name
        self.ids = list(frames)
        self._frames, self._speakers = frames, speakers
        self.total_frames = sum(frames.values())

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, id: str) -> bool:
        return id in self._frames

    def frames(self, id: str) -> int:
        """Return the number of frames of an utterance. Raises DataError if the utterance has no features."""
        self._require(id)
        return self._frames[id]

    def speaker(self, id: str) -> str:
        """Return the speaker of an utterance. Raises DataError if the utterance has no features."""
        self._require(id)
        return self._speakers.get(id, id)

    def _require(self, id: str) -> None:
        if id not in self._frames:
            raise DataError(self._missing(id), where=self.name)

    def _missing(self, id: str) -> str:
        """Return the error message for an utterance without features."""
        return f"utterance {id} has no features"


class FeatureStore(UtteranceFeatures):
    """A folder written by `extract`. The data are memory-mapped, so processes share them."""

    def __init__(self, folder: Path, index: dict[str, Any], data: np.ndarray, ranges: np.ndarray) -> None:
        rows = index["utterances"]
        super().__init__(str(folder), {id: frames for id, _, frames in rows}, {id: speaker for id, speaker, _ in rows})
        self.folder = folder
        self.options: dict[str, Any] = index["options"]
        self.skipped: dict[str, str] = index["skipped"]
        self._bounds = np.concatenate([[0], np.cumsum([frames for _, _, frames in rows])])
        self._number = {id: n for n, id in enumerate(self.ids)}
        self._data, self._ranges = data, ranges
        self.static_dim = int(self.options["mels"])
        self.deltas = int(self.options["deltas"])
        self.dim = self.static_dim * (self.deltas + 1)

    @classmethod
    def open(cls, folder: Path | str) -> FeatureStore:
        """Map a folder of features into memory. Raises DataError if it is missing, incomplete or of another format."""
        folder = Path(folder)
        hint = "extract the features again"
        try:
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            if index["format"] != FORMAT:
                raise DataError(f"the features must have format {FORMAT} (got {index['format']})", where=str(folder), hint=hint)
            _check_index(index)
            mels, count = index["options"]["mels"], len(index["utterances"])
            frames = sum(int(row[2]) for row in index["utterances"])
            ranges = np.load(folder / RANGES, allow_pickle=False)
            data = np.memmap(folder / DATA, np.uint8, mode="r").reshape(-1, mels)
        except FileNotFoundError as error:
            raise DataError("the features are missing or incomplete", where=str(error.filename or folder), hint=hint) from None
        except PARSE_ERRORS as error:
            raise DataError(f"the features cannot be read: {error}", where=str(folder), hint=hint) from None
        if len(data) != frames or ranges.shape != (count, 2, mels) or ranges.dtype.kind != "f":
            raise DataError(f"the features have {len(data)} frames, their index {frames}", where=str(folder), hint=hint)
        return cls(folder, index, data, ranges)

    def __reduce__(self) -> tuple[Any, ...]:
        return FeatureStore.open, (self.folder,)

    def static(self, id: str) -> np.ndarray:
        """Return the normalized features without deltas, float32 [frames, mels]."""
        number = self._find(id)
        return self._values(number, int(self._bounds[number]), int(self._bounds[number + 1]))

    def __getitem__(self, id: str) -> np.ndarray:
        """Return the normalized features with deltas, float32 [frames, dim]."""
        return add_deltas(self.static(id), self.deltas)

    def window(self, id: str, start: int, stop: int) -> np.ndarray:
        """Return self[id][start:stop] without computing the rest; 0 <= start <= stop <= frames."""
        number, reach = self._find(id), DELTA_WINDOW * self.deltas
        first, end = int(self._bounds[number]), int(self._bounds[number + 1])
        left, right = max(first + start - reach, first), min(first + stop + reach, end)
        before, after = left - (first + start - reach), (first + stop + reach) - right
        return context_deltas(np.pad(self._values(number, left, right), ((before, after), (0, 0)), mode="edge"), self.deltas)

    def quantized(self, id: str) -> tuple[np.ndarray, np.ndarray]:
        """Return uint8 [frames, mels] and float32 [2, mels], low and step: low + byte * step is normalized."""
        number = self._find(id)
        return self._data[int(self._bounds[number]) : int(self._bounds[number + 1])], self._ranges[number]

    @property
    def configuration(self) -> dict[str, Any]:
        """Return the properties in which compatible features must agree."""
        return {"kind": "log-mel", **self.options}

    def _values(self, number: int, first: int, end: int) -> np.ndarray:
        low, step = self._ranges[number]
        values = self._data[first:end].astype(np.float32)
        values *= step
        values += low
        return values

    def _find(self, id: str) -> int:
        self._require(id)
        return self._number[id]

    def _missing(self, id: str) -> str:
        return f"{super()._missing(id)}: {self.skipped.get(id, 'it was not in the corpus')}"


def _check_index(index: dict[str, Any]) -> None:
    """Raise ValueError if a field of features.json has a wrong type."""
    options, rows, skipped = index["options"], index["utterances"], index["skipped"]
    numbers = [options["mels"], options["deltas"]]
    if not isinstance(options, dict) or not all(type(n) is int and 0 <= n < 1 << 20 for n in numbers) or numbers[0] < 1:
        raise ValueError("options hold a wrong number of features")
    if numbers[1] > 8 or not isinstance(skipped, dict):
        raise ValueError("deltas or skipped utterances are wrong")
    for id, speaker, frames in rows:
        if type(id) is not str or type(speaker) is not str or type(frames) is not int or not 0 <= frames < 1 << 40:
            raise ValueError(f"wrong entry of utterance {id!r}")
    if len({id for id, _, _ in rows}) != len(rows):
        raise ValueError("an utterance occurs twice")


class KaldiFeatures(UtteranceFeatures):
    """The matrices of a Kaldi feats.scp. Speakers come from the utt2spk in its folder, if there is one."""

    def __init__(self, scp: Path, *, cmvn: bool = False, deltas: bool = False) -> None:
        self._matrices = read_matrices(scp)
        ids = sorted(self._matrices)
        if not ids:
            raise DataError("the list of features is empty", where=str(scp))
        super().__init__(str(scp), {id: self._matrices.shape(id)[0] for id in ids}, _read_speakers(scp.parent / "utt2spk"))
        self.static_dim = self._matrices.shape(ids[0])[1]
        self.deltas = 2 if deltas else 0
        self.dim = self.static_dim * (self.deltas + 1)
        self._cmvn = _read_cmvn(scp.parent / "cmvn.scp", self.static_dim) if cmvn else None

    def static(self, id: str) -> np.ndarray:
        """Return the features without deltas, normalized if `cmvn` is set. Raises DataError if they exceed the free memory."""
        frames = self.frames(id)
        memory_guard.require(
            4.0 * frames * (self.static_dim + self.dim), f"features of {frames} frames", f"utterance {id}, {self.name}"
        )
        x = self._matrices[id]
        if x.shape != (frames, self.static_dim):
            raise DataError(
                f"utterance {id} must have {self.static_dim} features per frame (got {x.shape[1]})", where=self.name
            )
        if self._cmvn is not None:
            speaker = self.speaker(id)
            key = speaker if speaker in self._cmvn else id
            if key not in self._cmvn:
                raise DataError(f"cmvn.scp has no statistics for {speaker} (utterance {id})", where=self.name)
            mean, scale = self._cmvn[key]
            x = (x - mean) * scale
        return x

    def __getitem__(self, id: str) -> np.ndarray:
        """Return the features with deltas, float32 [frames, dim]."""
        return add_deltas(self.static(id), self.deltas)

    @property
    def configuration(self) -> dict[str, Any]:
        """Return the properties in which compatible features must agree."""
        return {"kind": "kaldi", "mels": self.static_dim, "deltas": self.deltas, "cmvn": self._cmvn is not None}


class ConcatFeatures(UtteranceFeatures):
    """Streams pasted frame by frame, for the utterances that all streams have. `static` is that of the first stream."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        if not streams:
            raise UsageError("features must name at least one stream", where="features")
        self.streams = list(streams)
        self.name = "+".join(stream.name for stream in streams)
        ids = sorted(set(streams[0].ids).intersection(*(stream.ids for stream in streams[1:])))
        if not ids:
            raise DataError("the feature streams have no utterance in common", where=self.name)
        frames = {id: self._common_frames(id) for id in ids}
        super().__init__(self.name, frames, {id: streams[0].speaker(id) for id in ids})
        self.dim = sum(stream.dim for stream in streams)
        self.static_dim: int = getattr(streams[0], "static_dim", streams[0].dim)

    @classmethod
    def from_spec(cls, text: str) -> ConcatFeatures:
        """Open the streams of a specification, "a+b+c"."""
        return cls([_open_stream(part.strip()) for part in text.split("+")])

    def static(self, id: str) -> np.ndarray:
        """Return the static features of the first stream, cut to the common number of frames."""
        return self.streams[0].static(id)[: self.frames(id)]

    def __getitem__(self, id: str) -> np.ndarray:
        """Return the pasted features, float32 [frames, dim]."""
        total = self.frames(id)
        return np.concatenate([_held(stream[id], total) for stream in self.streams], axis=1)

    @property
    def configuration(self) -> dict[str, Any]:
        """Return the properties in which compatible features must agree."""
        return {"kind": "pasted", "streams": [getattr(stream, "configuration", None) for stream in self.streams]}

    def _missing(self, id: str) -> str:
        return f"utterance {id} is not in every feature stream"

    def _common_frames(self, id: str) -> int:
        counts = [stream.frames(id) for stream in self.streams]
        longest = max(counts)
        total = min(n for n in counts if longest - n <= LENGTH_TOLERANCE)
        for stream, n in zip(self.streams, counts, strict=True):
            if n < total and n not in (1, math.ceil(total / HELD_FRAMES), math.ceil(longest / HELD_FRAMES)):
                raise DataError(
                    f"utterance {id} has {n} frames in one stream and {longest} in another",
                    where=f"{stream.name} of {self.name}",
                    hint=f"give streams with the same number of frames, with one row per {HELD_FRAMES} frames, or with one row",
                )
        return total


def _held(x: np.ndarray, total: int) -> np.ndarray:
    """Return `total` rows: x cut, its only row repeated, or each row repeated HELD_FRAMES times."""
    if len(x) >= total:
        return x[:total]
    if len(x) == 1:
        return np.repeat(x, total, axis=0)
    return np.repeat(x, HELD_FRAMES, axis=0)[:total]


def from_spec(text: str) -> FeatureStore | KaldiFeatures | AdaptedFeatures | ConcatFeatures:
    """Open the features of a specification: a folder, a Kaldi list, or several joined by '+'.

    Raises UsageError for a malformed specification and DataError for unreadable features.
    """
    return ConcatFeatures.from_spec(text) if "+" in text and not Path(text).is_dir() else _open_stream(text.strip())


def _open_stream(part: str) -> FeatureStore | KaldiFeatures | AdaptedFeatures:
    path, _, options = part.partition("[")
    if path and not options and (Path(path) / adaptation.METADATA).is_file():
        return adaptation.load(Path(path), FeatureStore.open(adaptation.base_folder(Path(path))))
    if path and not options and Path(path).is_dir():
        return FeatureStore.open(path)
    chosen = {word.strip() for word in options.rstrip("]").split(",") if word.strip()}
    if not path.endswith(".scp") or not chosen <= {"cmvn", "deltas"} or (options and not part.endswith("]")):
        raise UsageError(
            f"'{part}' is not a feature specification",
            where="features",
            hint="name a folder of features, feats.scp or feats.scp[cmvn,deltas]",
        )
    return KaldiFeatures(Path(path), cmvn="cmvn" in chosen, deltas="deltas" in chosen)


def _read_speakers(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    with reading("the speakers", path):
        rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    for number, row in enumerate(rows, 1):
        if len(row) != 2:
            raise DataError(f"the line must be 'UTTERANCE SPEAKER' (got '{' '.join(row)}')", where=f"{path}, line {number}")
    return dict(rows)


def _read_cmvn(path: Path, dim: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return mean and 1 / deviation by speaker from Kaldi's sums [2, dim + 1], whose last column is the count."""
    normalization: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    stats = read_matrices(path)
    for id in stats:
        sums = stats[id].astype(np.float64)
        if sums.shape != (2, dim + 1) or not sums[0, -1] > 0:
            raise DataError(f"the statistics of {id} must be those of {dim} features (got {sums.shape})", where=str(path))
        mean = sums[0, :-1] / sums[0, -1]
        variance = sums[1, :-1] / sums[0, -1] - mean**2
        normalization[id] = mean.astype(np.float32), (1 / np.sqrt(np.maximum(variance, 1e-10))).astype(np.float32)
    return normalization
