"""Corpora that recipes can read, one module for each layout.

Every reader takes a folder and returns utterances by set: train, dev, test. A folder of Kaldi data directories (train/wav.scp,
test/wav.scp) is accepted in place of any corpus layout. If a corpus has no dev set, `hold_out` splits one off the training set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from roundelay.errors import DataError, UsageError, did_you_mean
from roundelay.speech.corpora.audiomnist import prepare_audiomnist
from roundelay.speech.corpora.fsdd import prepare_fsdd
from roundelay.speech.corpora.kaldi_dir import prepare_kaldi_dirs
from roundelay.speech.corpora.lhotse_manifest import prepare_lhotse
from roundelay.speech.corpora.librispeech import prepare_librispeech
from roundelay.speech.corpora.speech_commands import prepare_speech_commands
from roundelay.speech.corpora.speechocean762 import prepare_speechocean762
from roundelay.speech.corpora.utterance import Sets, Utterance

__all__ = ["CORPORA", "CorpusReader", "hold_out", "read_corpus"]

MIN_SPEAKERS_TO_SPLIT = 10
"""With fewer speakers than this, single utterances are held out instead of whole speakers."""


@dataclass(frozen=True)
class CorpusReader:
    """Entry of the corpus table: the reader, a description, and where to get the corpus."""

    prepare: Callable[[Path], Sets]
    description: str
    source: str
    kaldi_dirs: bool = True
    """Whether a folder of Kaldi data directories is accepted instead."""


CORPORA: dict[str, CorpusReader] = {
    "kaldi": CorpusReader(
        prepare_kaldi_dirs,
        "Kaldi data directories: SET/wav.scp, SET/text, SET/utt2spk",
        "any folder of Kaldi data directories",
    ),
    "lhotse": CorpusReader(
        prepare_lhotse,
        "lhotse manifests: PREFIX_recordings_SET.jsonl.gz with PREFIX_supervisions_SET.jsonl.gz, or PREFIX_cuts_SET.jsonl.gz",
        "any folder of lhotse manifests",
        kaldi_dirs=False,
    ),
    "fsdd": CorpusReader(
        prepare_fsdd,
        "free spoken digit dataset: English digits, 8 kHz",
        "github.com/Jakobovski/free-spoken-digit-dataset",
    ),
    "audiomnist": CorpusReader(
        prepare_audiomnist, "AudioMNIST: English digits of 60 speakers, 48 kHz", "github.com/soerenab/AudioMNIST"
    ),
    "speech_commands": CorpusReader(
        prepare_speech_commands,
        "Speech Commands: the ten command words, 16 kHz",
        "Speech Commands v0.02, arXiv:1804.03209",
    ),
    "speechocean762": CorpusReader(
        prepare_speechocean762, "speechocean762: read English of Mandarin speakers, 16 kHz", "openslr.org/101"
    ),
    "librispeech": CorpusReader(
        prepare_librispeech,
        "LibriSpeech or mini-LibriSpeech: read English, 16 kHz",
        "openslr.org/12, or openslr.org/31 for mini-LibriSpeech",
    ),
}


def read_corpus(kind: str, folder: Path) -> Sets:
    """Return the sets of the corpus in `folder`, each sorted by utterance id.

    Raises UsageError for an unknown `kind` and DataError if the folder is missing or does not have the layout of the corpus.
    """
    if kind not in CORPORA:
        raise UsageError(f"unknown corpus kind '{kind}'", where="corpus", hint=did_you_mean(kind, CORPORA))
    reader = CORPORA[kind]
    if not folder.is_dir():
        raise DataError(
            "the corpus folder does not exist",
            where=str(folder),
            hint=f"download the corpus ({reader.source}) and set root to its folder",
        )
    sets = prepare_kaldi_dirs(folder) if reader.kaldi_dirs else {}
    sets = sets or reader.prepare(folder)
    if not any(sets.values()):
        raise DataError(
            f"the folder does not have the layout of {kind} ({reader.description})",
            where=str(folder),
            hint=f"set root to the folder of the corpus: {reader.source}",
        )
    return {part: sorted(utterances, key=lambda u: u.id) for part, utterances in sets.items()}


def hold_out(
    utterances: list[Utterance], share: float, seed: int, by: str = "speaker"
) -> tuple[list[Utterance], list[Utterance]]:
    """Split utterances into (kept, held out): whole speakers, or single utterances if there are few speakers.

    The split depends on the ids, `share` and `seed` only. At least one speaker or utterance is held out.
    """
    rng = np.random.default_rng([seed, 0xDE5])
    speakers = sorted({u.speaker for u in utterances})
    if by == "speaker" and len(speakers) >= MIN_SPEAKERS_TO_SPLIT:
        chosen = set(rng.permutation(speakers)[: max(1, round(share * len(speakers)))].tolist())
        held_out = {u.id for u in utterances if u.speaker in chosen}
    else:
        ids = sorted(u.id for u in utterances)
        held_out = set(rng.permutation(ids)[: max(1, round(share * len(ids)))].tolist())
    return [u for u in utterances if u.id not in held_out], [u for u in utterances if u.id in held_out]
