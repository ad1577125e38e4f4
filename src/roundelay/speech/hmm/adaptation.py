"""Speaker-adapted features: fMLLR transforms estimated from transcripts or from first-pass hypotheses.

An adapted stream applies the front end of a trained model, then the transform of the utterance's speaker. It has the interface
of every other stream, so it trains GMMs (SAT), and pasted to log-mels it feeds a network, as in the published systems.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from roundelay.core.process_map import process_map
from roundelay.errors import DataError
from roundelay.speech.hmm.fmllr import SpeakerStatistics, apply_fmllr
from roundelay.speech.hmm.frontend import Frontend
from roundelay.speech.hmm.lexicon import SILENCE
from roundelay.speech.hmm.model import AlignmentModel
from roundelay.speech.hmm.viterbi import Array

if TYPE_CHECKING:
    from roundelay.speech.features.feature_store import Stream
    from roundelay.speech.hmm.lexicon import Lexicon

METADATA, ARRAYS = "adapted.json", "adapted.safetensors"
FRONTEND, SPEAKER = "frontend", "speaker "
"""Names of arrays: the matrix of the front end, and the prefix of each speaker's transform."""
PRIOR_FRAMES = 20.0


class AdaptedFeatures:
    """A stream, the front end of a model, and an fMLLR transform per speaker; other speakers' features stay unadapted."""

    def __init__(self, base: Stream, frontend: Frontend, transforms: Mapping[str, Array]) -> None:
        self.base, self.frontend, self.transforms = base, frontend, dict(transforms)
        self.ids, self.name = base.ids, f"{base.name} (adapted)"
        self.dim = self.static_dim = frontend.dim(base.static(base.ids[0]).shape[1])
        self.total_frames = sum(base.frames(id) for id in self.ids)

    def frames(self, id: str) -> int:
        return self.base.frames(id)

    def speaker(self, id: str) -> str:
        return self.base.speaker(id)

    def static(self, id: str) -> Array:
        return self[id]

    def __getitem__(self, id: str) -> Array:
        x = self.frontend(self.base.static(id))
        matrix = self.transforms.get(self.base.speaker(id))
        return x if matrix is None else apply_fmllr(x, matrix)

    @property
    def configuration(self) -> dict[str, Any]:
        return {"kind": "adapted", "base": getattr(self.base, "configuration", None), "dim": self.dim}

    def save(self, folder: Path) -> None:
        """Write the transforms and the front end; the base stream is referenced by its relative path."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / METADATA).unlink(missing_ok=True)
        arrays = {f"{SPEAKER}{name}": np.asarray(matrix, np.float64) for name, matrix in self.transforms.items()}
        if self.frontend.matrix is not None:
            arrays[FRONTEND] = np.ascontiguousarray(self.frontend.matrix, np.float32)
        save_file(arrays, folder / ARRAYS)
        base = os.path.relpath(Path(self.base.name).resolve(), folder.resolve())
        frontend = {"keep": self.frontend.keep, "deltas": self.frontend.deltas, "splice": self.frontend.splice}
        (folder / METADATA).write_text(json.dumps({"features": base, "frontend": frontend}), encoding="utf-8")


def base_folder(folder: Path) -> Path:
    """Return the folder of the features that adapted features are computed from."""
    return (folder / _read_metadata(folder)["features"]).resolve()


def load(folder: Path, base: Stream) -> AdaptedFeatures:
    """Open adapted features that `AdaptedFeatures.save` wrote, on top of their base features."""
    try:
        arrays = load_file(folder / ARRAYS)
        frontend = Frontend(**_read_metadata(folder)["frontend"], matrix=arrays.pop(FRONTEND, None))
        return AdaptedFeatures(base, frontend, {name.removeprefix(SPEAKER): matrix for name, matrix in arrays.items()})
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DataError(
            f"the adapted features cannot be read: {error}", where=str(folder), hint="compute the transforms again"
        ) from None


def _read_metadata(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / METADATA).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise DataError(
            f"the adapted features cannot be read: {error}", where=str(folder), hint="compute the transforms again"
        ) from None


def adapt(
    model: AlignmentModel,
    base: Stream,
    transcripts: Mapping[str, Sequence[str]],
    lexicon: Lexicon,
    *,
    prior_frames: float = PRIOR_FRAMES,
    jobs: int = 1,
    progress: str = "auto",
) -> AdaptedFeatures:
    """Estimate fMLLR transforms from the words of utterances: reference transcripts, or hypotheses of a first pass.

    The prior counts as `prior_frames` frames drawn from the model, so a speaker with little data gets a transform near the
    identity. A speaker without words gets none. Runs in `jobs` processes.
    """
    speakers: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
    for id in base.ids:
        if transcripts.get(id):
            speakers.setdefault(base.speaker(id), []).append((id, tuple(transcripts[id])))
    prior = SpeakerStatistics.expected(model.gmm, prior_frames)
    work = partial(_speaker_transform, model=model, base=base, lexicon=lexicon, prior=prior)
    names = sorted(speakers)
    transforms = process_map(
        work, [speakers[name] for name in names], jobs=jobs, progress=progress, chunk=4, what="adapting", unit="speakers"
    )
    return AdaptedFeatures(base, model.frontend, dict(zip(names, transforms, strict=True)))


def _speaker_transform(
    utterances: Sequence[tuple[str, tuple[str, ...]]],
    model: AlignmentModel,
    base: Stream,
    lexicon: Lexicon,
    prior: SpeakerStatistics,
) -> Array:
    statistics = SpeakerStatistics.empty(model.gmm.dim)
    for id, words in utterances:
        x = model.features(base.static(id))
        try:
            alignment = model.align_features(x, words, model.graph(words, lexicon, id), id)
        except DataError:
            continue  # too short for these words
        speech = np.ones(len(x), bool)
        for phone, begin, end in alignment.phones:
            speech[begin:end] = phone != SILENCE  # silence depends on the room, not on the speaker
        statistics.accumulate(x[speech], alignment.pdfs[speech], model.gmm)
    return (statistics + prior).transform()
