"""Features on disk: our folders mapped into memory, Kaldi's feats.scp, and several of them side by side.

All have the same face: `ids`, `dim`, `frames(id)`, `speaker(id)`, `[id]` -> float32 [frames, dim]. A specification names them:
"exp/feats" is a folder (of features, or of the transforms that adapt other features to their speakers), "feats.scp" a Kaldi
list, "feats.scp[cmvn,deltas]" one normalised by the cmvn.scp beside it and with deltas, and "a+b+c" pastes streams. Streams of
one row (i-vectors) hold for the whole utterance, streams with one row for ten frames (online i-vectors) for ten frames each;
others may differ by two frames, and end with the shortest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from roundelay.errors import DataError, UsageError
from roundelay.speech import memory_guard
from roundelay.speech.features.fbank import DELTA_WINDOW, add_deltas, context_deltas
from roundelay.speech.features.kaldi_ark import Matrices, read_matrices
from roundelay.speech.hmm import adaptation
from roundelay.speech.hmm.adaptation import AdaptedFeatures

FORMAT = 1
INDEX, DATA, RANGES = "features.json", "features.u8", "ranges.npy"
HELD_FRAMES = 10
LENGTH_TOLERANCE = 2


class Stream(Protocol):
    ids: list[str]
    dim: int
    name: str

    def frames(self, id: str) -> int: ...

    def speaker(self, id: str) -> str: ...

    def static(self, id: str) -> np.ndarray: ...

    def __getitem__(self, id: str) -> np.ndarray: ...


class FeatureStore:
    """A folder written by `extract`; opened once per process, its bytes are shared between all of them."""

    def __init__(self, folder: Path, index: dict[str, Any], data: np.ndarray, ranges: np.ndarray) -> None:
        self.folder, self.name = folder, str(folder)
        self.options: dict[str, Any] = index["options"]
        self.skipped: dict[str, str] = index["skipped"]
        self.ids: list[str] = [id for id, _, _ in index["utterances"]]
        self._speakers: list[str] = [speaker for _, speaker, _ in index["utterances"]]
        self._bounds = np.concatenate([[0], np.cumsum([frames for _, _, frames in index["utterances"]])])
        self._number = {id: n for n, id in enumerate(self.ids)}
        self._data, self._ranges = data, ranges
        self.static_dim = int(self.options["mels"])
        self.deltas = int(self.options["deltas"])
        self.dim = self.static_dim * (self.deltas + 1)
        self.total_frames = int(self._bounds[-1])

    @classmethod
    def open(cls, folder: Path | str) -> FeatureStore:
        folder = Path(folder)
        do = "make the features again"
        try:
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            if index["format"] != FORMAT:
                raise DataError(
                    f"the features have format {index['format']}, this version reads {FORMAT}", where=str(folder), hint=do
                )
            mels, count = int(index["options"]["mels"]), len(index["utterances"])
            frames = sum(int(row[2]) for row in index["utterances"])
            ranges = np.load(folder / RANGES, allow_pickle=False)
            data = np.memmap(folder / DATA, np.uint8, mode="r").reshape(-1, mels)
        except FileNotFoundError as error:
            raise DataError(
                "there are no features here, or not all of them", where=str(error.filename or folder), hint=do
            ) from None
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise DataError(f"the features cannot be read: {error}", where=str(folder), hint=do) from None
        if len(data) != frames or ranges.shape != (count, 2, mels):
            raise DataError(f"the features hold {len(data)} frames, their index speaks of {frames}", where=str(folder), hint=do)
        return cls(folder, index, data, ranges)

    def __reduce__(self) -> tuple[Any, ...]:
        return FeatureStore.open, (self.folder,)

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, id: str) -> bool:
        return id in self._number

    def frames(self, id: str) -> int:
        number = self._find(id)
        return int(self._bounds[number + 1] - self._bounds[number])

    def speaker(self, id: str) -> str:
        return self._speakers[self._find(id)]

    def static(self, id: str) -> np.ndarray:
        """float32 [frames, mels], normalised."""
        number = self._find(id)
        return self._values(number, int(self._bounds[number]), int(self._bounds[number + 1]))

    def __getitem__(self, id: str) -> np.ndarray:
        """float32 [frames, dim], normalised, with deltas."""
        return add_deltas(self.static(id), self.deltas)

    def window(self, id: str, start: int, stop: int) -> np.ndarray:
        """self[id][start:stop] without computing the rest; 0 <= start <= stop <= frames."""
        number, reach = self._find(id), DELTA_WINDOW * self.deltas
        first, end = int(self._bounds[number]), int(self._bounds[number + 1])
        left, right = max(first + start - reach, first), min(first + stop + reach, end)
        before, after = left - (first + start - reach), (first + stop + reach) - right
        return context_deltas(np.pad(self._values(number, left, right), ((before, after), (0, 0)), mode="edge"), self.deltas)

    def stored(self, id: str) -> tuple[np.ndarray, np.ndarray]:
        """uint8 [frames, mels] and float32 [2, mels]: low and step, so that low + byte * step is normalised."""
        number = self._find(id)
        return self._data[int(self._bounds[number]) : int(self._bounds[number + 1])], self._ranges[number]

    @property
    def configuration(self) -> dict[str, Any]:
        """What features of another configuration would not share."""
        return {"kind": "log-mel", **self.options}

    def _values(self, number: int, first: int, end: int) -> np.ndarray:
        low, step = self._ranges[number]
        values = self._data[first:end].astype(np.float32)
        values *= step
        values += low
        return values

    def _find(self, id: str) -> int:
        number = self._number.get(id)
        if number is None:
            reason = self.skipped.get(id, "it was not in the corpus")
            raise DataError(f"utterance {id} has no features: {reason}", where=self.name)
        return number


class KaldiFeatures:
    """The matrices of a Kaldi feats.scp; speakers from the utt2spk beside it, if there is one."""

    def __init__(self, scp: Path, *, cmvn: bool = False, deltas: bool = False) -> None:
        self.name = str(scp)
        self._matrices = read_matrices(scp)
        self.ids = sorted(self._matrices)
        if not self.ids:
            raise DataError("the list of features is empty", where=self.name)
        self._frames = {id: self._matrices.shape(id)[0] for id in self.ids}
        self.static_dim = self._matrices.shape(self.ids[0])[1]
        self._order = 2 if deltas else 0
        self.dim = self.static_dim * (self._order + 1)
        self._speakers = _read_speakers(scp.parent / "utt2spk")
        self._cmvn = _read_cmvn(scp.parent / "cmvn.scp", self.static_dim) if cmvn else None
        self.total_frames = sum(self._frames.values())

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, id: str) -> bool:
        return id in self._frames

    def frames(self, id: str) -> int:
        if id not in self._frames:
            raise DataError(f"utterance {id} has no features", where=self.name)
        return self._frames[id]

    def speaker(self, id: str) -> str:
        return self._speakers.get(id, id)

    def static(self, id: str) -> np.ndarray:
        frames = self.frames(id)
        memory_guard.require(
            4.0 * frames * (self.static_dim + self.dim), f"features of {frames} frames", f"utterance {id}, {self.name}"
        )
        x = self._matrices[id]
        if x.shape != (frames, self.static_dim):
            raise DataError(f"utterance {id} has {x.shape[1]} features per frame, others {self.static_dim}", where=self.name)
        if self._cmvn is not None:
            key = self.speaker(id) if self.speaker(id) in self._cmvn else id
            if key not in self._cmvn:
                raise DataError(f"cmvn.scp has no statistics of {self.speaker(id)} (utterance {id})", where=self.name)
            mean, scale = self._cmvn[key]
            x = (x - mean) * scale
        return x

    def __getitem__(self, id: str) -> np.ndarray:
        return add_deltas(self.static(id), self._order)

    @property
    def deltas(self) -> int:
        return self._order

    @property
    def configuration(self) -> dict[str, Any]:
        return {"kind": "kaldi", "mels": self.static_dim, "deltas": self._order, "cmvn": self._cmvn is not None}


class ConcatFeatures:
    """Streams side by side; utterances are those that all streams have. `static` is that of the first stream."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        if not streams:
            raise UsageError("no feature stream is named", where="features")
        self.streams = list(streams)
        self.name = "+".join(stream.name for stream in streams)
        common = set(streams[0].ids).intersection(*(stream.ids for stream in streams[1:]))
        self.ids = sorted(common)
        if not self.ids:
            raise DataError("the feature streams have no utterance in common", where=self.name)
        self.dim = sum(stream.dim for stream in streams)
        self.static_dim: int = getattr(streams[0], "static_dim", streams[0].dim)
        self._frames = {id: self._common_frames(id) for id in self.ids}
        self.total_frames = sum(self._frames.values())

    @classmethod
    def from_spec(cls, text: str) -> ConcatFeatures:
        return cls([_open_stream(part.strip()) for part in text.split("+")])

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, id: str) -> bool:
        return id in self._frames

    def frames(self, id: str) -> int:
        if id not in self._frames:
            raise DataError(f"utterance {id} is not in every feature stream", where=self.name)
        return self._frames[id]

    def speaker(self, id: str) -> str:
        return self.streams[0].speaker(id)

    def static(self, id: str) -> np.ndarray:
        return self.streams[0].static(id)[: self.frames(id)]

    def __getitem__(self, id: str) -> np.ndarray:
        total = self.frames(id)
        return np.concatenate([_held(stream[id], total) for stream in self.streams], axis=1)

    @property
    def configuration(self) -> dict[str, Any]:
        return {"kind": "pasted", "streams": [getattr(stream, "configuration", None) for stream in self.streams]}

    def _common_frames(self, id: str) -> int:
        counts = [stream.frames(id) for stream in self.streams]
        longest = max(counts)
        whole = [n for n in counts if longest - n <= LENGTH_TOLERANCE]
        total = min(whole)
        for stream, n in zip(self.streams, counts, strict=True):
            if n < total and n not in (1, math.ceil(total / HELD_FRAMES), math.ceil(longest / HELD_FRAMES)):
                raise DataError(
                    f"utterance {id} has {n} frames in one stream and {longest} in another",
                    where=f"{stream.name} of {self.name}",
                    hint=f"streams may have the same number of frames, one in {HELD_FRAMES}, or a single row",
                )
        return total


def _held(x: np.ndarray, total: int) -> np.ndarray:
    if len(x) >= total:
        return x[:total]
    if len(x) == 1:
        return np.repeat(x, total, axis=0)
    return np.repeat(x, HELD_FRAMES, axis=0)[:total]


def from_spec(text: str) -> FeatureStore | KaldiFeatures | AdaptedFeatures | ConcatFeatures:
    """Opens what a specification names: a folder of features, a Kaldi list, or several with '+' between them."""
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
            f"'{part}' names no features",
            where="features",
            hint="give a folder of features, feats.scp or feats.scp[cmvn,deltas]",
        )
    return KaldiFeatures(Path(path), cmvn="cmvn" in chosen, deltas="deltas" in chosen)


def _read_speakers(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    for number, row in enumerate(rows, 1):
        if len(row) != 2:
            raise DataError("a line that is not 'UTTERANCE SPEAKER'", where=f"{path}, line {number}")
    return dict(rows)


def _read_cmvn(path: Path, dim: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Mean and 1/deviation by speaker, from Kaldi's sums [2, dim + 1] whose last column holds the count."""
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    stats: Matrices = read_matrices(path)
    for id in stats:
        sums = stats[id].astype(np.float64)
        if sums.shape != (2, dim + 1) or not sums[0, -1] > 0:
            raise DataError(f"the statistics of {id} are not those of {dim} features", where=str(path))
        mean = sums[0, :-1] / sums[0, -1]
        variance = sums[1, :-1] / sums[0, -1] - mean**2
        found[id] = mean.astype(np.float32), (1 / np.sqrt(np.maximum(variance, 1e-10))).astype(np.float32)
    return found
