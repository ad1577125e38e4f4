"""Alignments of a corpus: which tied state every frame belongs to, made by an alignment model and kept in a folder.

The front door of the GMM-HMM part: `train_mono`, `train_tri`, `align_all`.
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
from roundelay.speech.hmm.hmm import Alignment, AlignmentModel
from roundelay.speech.hmm.train_gmm import MonoOptions, TriOptions, train_mono, train_tri

if TYPE_CHECKING:
    from roundelay.speech.corpora.utterance import Corpus, Utterance
    from roundelay.speech.features.feature_store import Stream
    from roundelay.speech.hmm.lexicon import Lexicon

__all__ = ["Alignments", "MonoOptions", "TriOptions", "align_all", "matched", "train_mono", "train_tri", "write_states"]

FORMAT = 1
INDEX, DATA = "alignments.json", "pdfs.npy"
Array = np.ndarray[Any, Any]
Scores = Callable[[str], Array]


class Alignments:
    """A folder written by `align_all`; the states of all frames are one array mapped into memory."""

    def __init__(self, folder: Path, index: dict[str, Any], pdfs: Array) -> None:
        self.folder, self._pdfs = folder, pdfs
        self.num_pdfs: int = index["pdfs"]
        self.ids: list[str] = [row["id"] for row in index["utterances"]]
        self.skipped: dict[str, str] = index["skipped"]
        self._rows = {row["id"]: row for row in index["utterances"]}

    @classmethod
    def open(cls, folder: Path | str) -> Alignments:
        folder = Path(folder)
        do = "align the corpus again"
        try:
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            if index["format"] != FORMAT:
                raise DataError(f"the alignments have format {index['format']}, not {FORMAT}", where=str(folder), hint=do)
            frames = sum(row["frames"] for row in index["utterances"])
            pdfs = np.load(folder / DATA, mmap_mode="r", allow_pickle=False)
            if pdfs.dtype != np.int32 or pdfs.shape != (frames,):
                raise DataError(
                    f"{DATA} holds {pdfs.dtype} {list(pdfs.shape)}, the index speaks of {frames} frames",
                    where=str(folder),
                    hint=do,
                )
            return cls(folder, index, pdfs)
        except FileNotFoundError as error:
            raise DataError("there are no alignments here", where=str(error.filename or folder), hint=do) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"the alignments cannot be read: {error}", where=str(folder), hint=do) from None

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, id: str) -> bool:
        return id in self._rows

    def __getitem__(self, id: str) -> Array:
        """The pdf of every frame, int32 [T]."""
        row = self._row(id)
        return np.asarray(self._pdfs[row["offset"] : row["offset"] + row["frames"]])

    def words(self, id: str) -> list[tuple[str, int, int]]:
        """(word, first frame, frame after the last); `roundelay.speech.hmm.hmm.seconds` turns frames into times."""
        return [(word, first, end) for word, first, end in self._row(id)["words"]]

    def score(self, id: str) -> float:
        """Log score per frame of the path that was chosen."""
        return float(self._row(id)["score"])

    def counts(self) -> Array:
        """Frames by pdf, int64 [num_pdfs]."""
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
    on_missing: str = "error",
) -> Alignments:
    """Aligns every utterance and writes the folder; those that have no path are skipped, with the reason.

    loglikes: scores [T, num_pdfs] by utterance, such as a network's, instead of the model's own; computed in this process.
    on_missing: 'error', or 'skip' utterances with a word that has no pronunciation.
    """
    folder = Path(folder)
    have = set(store.ids)
    skipped: dict[str, str] = {}
    wanted: list[Utterance] = []
    for utterance in corpus.utterances:
        reason = "" if utterance.id in have else "it has no features"
        missing = [word for word in utterance.words if not lexicon.entries.get(word)]
        if missing and on_missing == "skip":
            reason = f"the word '{missing[0]}' has no pronunciation"
        elif missing:
            raise DataError(
                f"the word '{missing[0]}' has no pronunciation",
                where=f"utterance {utterance.id} of {corpus.folder}",
                hint="add it to the lexicon, or skip utterances with unknown words",
            )
        if reason:
            skipped[utterance.id] = reason
        else:
            wanted.append(utterance)
    if loglikes is None:
        work = partial(_align_one, model=model, store=store, lexicon=lexicon)
        # The model travels with every chunk: few and large ones.
        results = process_map(
            work, wanted, jobs=jobs, progress=progress, chunk=max(16, len(wanted) // (8 * max(jobs, 1))), what="aligning"
        )
    else:
        work = partial(_align_scored, model=model, loglikes=loglikes, lexicon=lexicon)
        results = process_map(work, wanted, jobs=1, progress=progress, what="aligning")
    found: dict[str, Alignment] = {}
    for utterance, result in zip(wanted, results, strict=True):
        if isinstance(result, str):
            skipped[utterance.id] = result
        else:
            found[utterance.id] = result
    if not found:
        raise DataError(f"no utterance can be aligned: {_first(skipped)}", where=str(corpus.folder))
    about = {id: {"words": one.words, "score": one.score} for id, one in found.items()}
    return _write(folder, {id: one.pdfs for id, one in found.items()}, about, model.num_pdfs, skipped)


def write_states(folder: Path, states: Mapping[str, Array], num_pdfs: int, *, where: str = "") -> Alignments:
    """Alignments made elsewhere (the pdf of every frame by utterance) in a folder of ours; they have no words.

    where: the file they come from, for errors."""
    for id, pdfs in states.items():
        if len(pdfs) and not 0 <= pdfs.min() <= pdfs.max() < num_pdfs:
            what = f"utterance {id} is aligned to pdf {pdfs.max() if pdfs.max() >= num_pdfs else pdfs.min()} of {num_pdfs}"
            raise DataError(what, where=where or str(folder), hint="give the number of pdfs that the alignments were made with")
    return _write(Path(folder), states, {}, num_pdfs, {})


def _write(
    folder: Path, states: Mapping[str, Array], about: Mapping[str, dict[str, Any]], num_pdfs: int, skipped: dict[str, str]
) -> Alignments:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX).unlink(missing_ok=True)  # an interrupted run leaves no folder that looks whole
    rows: list[dict[str, Any]] = []
    offset = 0
    for id in sorted(states):
        rows.append({"id": id, "offset": offset, "frames": len(states[id]), **about.get(id, {"words": [], "score": 0.0})})
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
    scores = model.checked_scores(loglikes(utterance.id), utterance.id)
    try:
        return model.align_scores(scores, utterance.words, lexicon, utterance.id)
    except DataError as error:
        return error.message


def _first(skipped: dict[str, str]) -> str:
    id, reason = next(iter(skipped.items()))
    return f"{len(skipped)} skipped, for instance {id} ({reason})"


def matched(features: Stream, targets: Alignments, where: str) -> list[str]:
    """Utterances that have both features and an alignment of as many frames."""
    have = set(features.ids)
    found = [name for name in targets.ids if name in have]
    if not found:
        raise DataError("no utterance has both features and an alignment", where=where, hint="align the same data directory")
    for name in found:
        if features.frames(name) != len(targets[name]):
            raise DataError(
                f"utterance {name} has {features.frames(name)} frames of features and {len(targets[name])} of alignment",
                where=where,
                hint="align again: the features were made anew, or with another frame shift",
            )
    return found
