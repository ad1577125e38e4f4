"""Alignments of a corpus: the tied state (pdf) of each frame, in a folder.

The entry point to the GMM-HMM package: `train_mono`, `train_tri`, `align_all`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roundelay.core.process_map import process_map
from roundelay.errors import DataError
from roundelay.speech.hmm.model import Alignment, AlignmentModel
from roundelay.speech.hmm.train_gmm import MonoOptions, TriOptions, train_mono, train_tri
from roundelay.speech.hmm.utterances import OnMissing, select_utterances, summarize_skipped
from roundelay.speech.hmm.viterbi import Array

if TYPE_CHECKING:
    from roundelay.speech.corpora.utterance import Corpus, Utterance
    from roundelay.speech.features.feature_store import Stream
    from roundelay.speech.hmm.lexicon import Lexicon

__all__ = [
    "Alignments",
    "MonoOptions",
    "TriOptions",
    "align_all",
    "matching_utterances",
    "train_mono",
    "train_tri",
    "write_alignments",
]

FORMAT = 1
INDEX, DATA = "alignments.json", "pdfs.npy"
Scores = Callable[[str], Array]


class Alignments:
    """A folder of alignments; the pdfs of all frames are one memory-mapped array."""

    def __init__(self, folder: Path, index: dict[str, Any], pdfs: Array) -> None:
        self.folder, self._pdfs = folder, pdfs
        self.num_pdfs: int = index["pdfs"]
        self.ids: list[str] = [row["id"] for row in index["utterances"]]
        self.skipped: dict[str, str] = index["skipped"]
        self._rows = {row["id"]: row for row in index["utterances"]}

    @classmethod
    def open(cls, folder: Path | str) -> Alignments:
        """Open a folder that `align_all` or `write_alignments` wrote; DataError if it is missing or damaged."""
        folder = Path(folder)
        hint = "align the corpus again"
        try:
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            if index["format"] != FORMAT:
                raise DataError(
                    f"the format of the alignments must be {FORMAT} (got {index['format']})", where=str(folder), hint=hint
                )
            frames = sum(row["frames"] for row in index["utterances"])
            pdfs = np.load(folder / DATA, mmap_mode="r", allow_pickle=False)
            if pdfs.dtype != np.int32 or pdfs.shape != (frames,):
                raise DataError(
                    f"{DATA} must hold int32 [{frames}] to match the index (got {pdfs.dtype} {list(pdfs.shape)})",
                    where=str(folder),
                    hint=hint,
                )
            return cls(folder, index, pdfs)
        except FileNotFoundError as error:
            raise DataError("there are no alignments here", where=str(error.filename or folder), hint=hint) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"the alignments cannot be read: {error}", where=str(folder), hint=hint) from None

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, id: str) -> bool:
        return id in self._rows

    def __getitem__(self, id: str) -> Array:
        """Return the pdf of each frame, int32 [T]."""
        row = self._row(id)
        return np.asarray(self._pdfs[row["offset"] : row["offset"] + row["frames"]])

    def words(self, id: str) -> list[tuple[str, int, int]]:
        """Return (word, first frame, frame after the last); `roundelay.speech.hmm.model.seconds` converts frames to times."""
        return [(word, first, end) for word, first, end in self._row(id)["words"]]

    def score(self, id: str) -> float:
        """Return the log likelihood per frame of the best path."""
        return float(self._row(id)["score"])

    def counts(self) -> Array:
        """Return the number of frames of each pdf, int64 [num_pdfs]."""
        return np.bincount(self._pdfs, minlength=self.num_pdfs).astype(np.int64)

    def _row(self, id: str) -> dict[str, Any]:
        if id not in self._rows:
            reason = self.skipped.get(id, "it was not in the corpus")
            raise DataError(f"utterance {id} has no alignment: {reason}", where=str(self.folder))
        return self._rows[id]


def align_all(
    model: AlignmentModel,
    store: Stream,
    corpus: Corpus,
    lexicon: Lexicon,
    folder: Path,
    *,
    jobs: int = 1,
    progress: str = "auto",
    loglikes: Scores | None = None,
    on_missing: OnMissing = "error",
) -> Alignments:
    """Align all utterances and write the folder. Utterances without a path are skipped, with the reason in `skipped`.

    loglikes: function from utterance id to scores [T, num_pdfs], such as a network's. It replaces the model's own scores and
    runs in the calling process.
    on_missing: 'error', or 'skip' utterances with a word that has no pronunciation.
    Raises DataError if no utterance can be aligned.
    """
    folder = Path(folder)
    selection = select_utterances(store, corpus, lexicon, on_missing)
    utterances, skipped = selection.usable, selection.skipped
    if loglikes is None:
        work = partial(_align_one, model=model, store=store, lexicon=lexicon)
        # The model is pickled with every chunk: use few and large chunks.
        results = process_map(
            work,
            utterances,
            jobs=jobs,
            progress=progress,
            chunk=max(16, len(utterances) // (8 * max(jobs, 1))),
            what="aligning",
        )
    else:
        work = partial(_align_scored, model=model, loglikes=loglikes, lexicon=lexicon)
        results = process_map(work, utterances, jobs=1, progress=progress, what="aligning")
    alignments: dict[str, Alignment] = {}
    for utterance, result in zip(utterances, results, strict=True):
        if isinstance(result, str):
            skipped[utterance.id] = result
        else:
            alignments[utterance.id] = result
    if not alignments:
        raise DataError(f"no utterance can be aligned: {summarize_skipped(skipped)}", where=str(corpus.folder))
    details = {id: {"words": one.words, "score": one.score} for id, one in alignments.items()}
    return _write(folder, {id: one.pdfs for id, one in alignments.items()}, details, model.num_pdfs, skipped)


def write_alignments(folder: Path, states: Mapping[str, Array], num_pdfs: int, *, where: str = "") -> Alignments:
    """Write alignments from another toolkit (the pdf of each frame, by utterance); they have no words.

    where: the source file, for error messages. Raises DataError if a pdf is not in 0 … num_pdfs - 1.
    """
    for id, pdfs in states.items():
        if len(pdfs) and not 0 <= pdfs.min() <= pdfs.max() < num_pdfs:
            wrong = pdfs.max() if pdfs.max() >= num_pdfs else pdfs.min()
            raise DataError(
                f"pdfs of utterance {id} must be >= 0 and < {num_pdfs} (got {wrong})",
                where=where or str(folder),
                hint="pass the number of pdfs of the model that made the alignments",
            )
    return _write(Path(folder), states, {}, num_pdfs, {})


def _write(
    folder: Path, states: Mapping[str, Array], details: Mapping[str, dict[str, Any]], num_pdfs: int, skipped: dict[str, str]
) -> Alignments:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX).unlink(missing_ok=True)  # an interrupted run must not leave a folder that looks complete
    rows: list[dict[str, Any]] = []
    offset = 0
    for id in sorted(states):
        rows.append({"id": id, "offset": offset, "frames": len(states[id]), **details.get(id, {"words": [], "score": 0.0})})
        offset += len(states[id])
    joined = np.concatenate([states[row["id"]] for row in rows]) if rows else np.zeros(0)
    np.save(folder / DATA, joined.astype(np.int32), allow_pickle=False)
    part = folder / (INDEX + ".part")
    index = {"format": FORMAT, "pdfs": num_pdfs, "utterances": rows, "skipped": skipped}
    part.write_text(json.dumps(index), encoding="utf-8")
    part.replace(folder / INDEX)
    return Alignments.open(folder)


def _align_one(utterance: Utterance, model: AlignmentModel, store: Stream, lexicon: Lexicon) -> Alignment | str:
    graph = model.graph(utterance.words, lexicon, utterance.id)
    try:
        return model.align_features(model.features(store.static(utterance.id)), utterance.words, graph, utterance.id)
    except DataError as error:
        return error.message


def _align_scored(utterance: Utterance, model: AlignmentModel, loglikes: Scores, lexicon: Lexicon) -> Alignment | str:
    scores = model.validate_scores(loglikes(utterance.id), utterance.id)
    try:
        return model.align_scores(scores, utterance.words, lexicon, utterance.id)
    except DataError as error:
        return error.message


def matching_utterances(features: Stream, targets: Alignments, where: str) -> list[str]:
    """Return the utterances that have features and an alignment; DataError if there are none, or their lengths differ."""
    have_features = set(features.ids)
    names = [name for name in targets.ids if name in have_features]
    if not names:
        raise DataError("no utterance has both features and an alignment", where=where, hint="align the same data directory")
    for name in names:
        if features.frames(name) != len(targets[name]):
            raise DataError(
                f"utterance {name} has {features.frames(name)} frames of features and {len(targets[name])} of alignment",
                where=where,
                hint="align again: the features have changed, or have another frame shift",
            )
    return names
