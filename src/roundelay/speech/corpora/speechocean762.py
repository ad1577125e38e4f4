"""speechocean762, which is distributed as Kaldi data directories: train/ and test/, with paths relative to the corpus."""

from __future__ import annotations

from pathlib import Path

from roundelay.speech.corpora.kaldi_dir import prepare_kaldi_dirs
from roundelay.speech.corpora.utterance import Sets


def prepare_speechocean762(folder: Path) -> Sets:
    """Return the train and test sets of the corpus in `folder`."""
    return prepare_kaldi_dirs(folder)
