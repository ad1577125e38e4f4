"""Features in a space of each speaker's own: transforms estimated from what the speaker said, or seems to have said.

A stream of adapted features holds for every utterance what the Gaussians of a trained model would see of it, through the
transform of its speaker. It has the face of any stream, so it trains mixtures, and pasted beside log-mels it feeds a network,
as fMLLR streams do in the published systems.
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
from roundelay.speech.hmm.fmllr import SpeakerStatistics, adapted
from roundelay.speech.hmm.hmm import SILENCE, AlignmentModel, Frontend
from roundelay.speech.hmm.viterbi import Array

if TYPE_CHECKING:
    from roundelay.speech.features.feature_store import Stream
    from roundelay.speech.hmm.lexicon import Lexicon

ABOUT, ARRAYS = "adapted.json", "adapted.safetensors"
FRONTEND, SPEAKER = "frontend", "speaker "
"""Names of arrays: the front end's matrix, and every speaker's transform behind the speaker's name."""
PRIOR_FRAMES = 20.0


class AdaptedFeatures:
    """A stream, the front end of a model on top of it, and a transform for each speaker; without one nothing is changed."""

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
        return x if matrix is None else adapted(x, matrix)

    @property
    def configuration(self) -> dict[str, Any]:
        return {"kind": "adapted", "base": getattr(self.base, "configuration", None), "dim": self.dim}

    def save(self, folder: Path) -> None:
        """Transforms and front end; the stream below them stays where it is."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ABOUT).unlink(missing_ok=True)
        arrays = {f"{SPEAKER}{name}": np.asarray(matrix, np.float64) for name, matrix in self.transforms.items()}
        if self.frontend.matrix is not None:
            arrays[FRONTEND] = np.ascontiguousarray(self.frontend.matrix, np.float32)
        save_file(arrays, folder / ARRAYS)
        below = os.path.relpath(Path(self.base.name).resolve(), folder.resolve())
        of = self.frontend
        about = {"features": below, "frontend": {"keep": of.keep, "deltas": of.deltas, "splice": of.splice}}
        (folder / ABOUT).write_text(json.dumps(about), encoding="utf-8")


def below(folder: Path) -> Path:
    """The folder of the features that adapted ones stand on."""
    return (folder / _about(folder)["features"]).resolve()


def load(folder: Path, base: Stream) -> AdaptedFeatures:
    """What `save` wrote, on the features it was made for."""
    try:
        arrays = load_file(folder / ARRAYS)
        frontend = Frontend(**_about(folder)["frontend"], matrix=arrays.pop(FRONTEND, None))
        return AdaptedFeatures(base, frontend, {name.removeprefix(SPEAKER): matrix for name, matrix in arrays.items()})
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DataError(f"the adapted features cannot be read: {error}", where=str(folder), hint="adapt again") from None


def _about(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / ABOUT).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise DataError(f"the adapted features cannot be read: {error}", where=str(folder), hint="adapt again") from None


def adapt(
    model: AlignmentModel,
    base: Stream,
    said: Mapping[str, Sequence[str]],
    lexicon: Lexicon,
    *,
    prior_frames: float = PRIOR_FRAMES,
    jobs: int = 1,
    progress: str = "auto",
) -> AdaptedFeatures:
    """Transforms from words by utterance: transcripts where there are some, or what a first pass has recognised. Everybody's
    speech counts as if the model itself had said `prior_frames` in the same voice: who says little is changed little."""
    speakers: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
    for id in base.ids:
        if said.get(id):
            speakers.setdefault(base.speaker(id), []).append((id, tuple(said[id])))
    prior = SpeakerStatistics.expected(model.gmm, prior_frames)
    work = partial(_transform, model=model, base=base, lexicon=lexicon, prior=prior)
    names = sorted(speakers)
    found = process_map(
        work, [speakers[name] for name in names], jobs=jobs, progress=progress, chunk=4, what="adapting", unit="speakers"
    )
    return AdaptedFeatures(base, model.frontend, dict(zip(names, found, strict=True)))


def _transform(
    spoken: Sequence[tuple[str, tuple[str, ...]]],
    model: AlignmentModel,
    base: Stream,
    lexicon: Lexicon,
    prior: SpeakerStatistics,
) -> Array:
    statistics = SpeakerStatistics.empty(model.gmm.dim)
    for id, words in spoken:
        x = model.features(base.static(id))
        try:
            found = model.align_features(x, words, model.graph(words, lexicon, id), id)
        except DataError:
            continue  # too short for these words: it tells nothing about the voice
        heard = np.ones(len(x), bool)
        for phone, begin, end in found.phones:
            heard[begin:end] = phone != SILENCE  # pauses are the room's, not the speaker's
        statistics.accumulate(x[heard], found.pdfs[heard], model.gmm)
    return (statistics + prior).transform()
