"""Utterances and corpora in memory, whatever format they were read from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Utterance:
    """Describe a stretch of a recording and its transcript. `end` is None if it ends with the recording."""

    id: str
    speaker: str
    words: tuple[str, ...]
    audio: Path
    start: float = 0.0
    end: float | None = None
    command: str = field(default="", repr=False)
    """Shell command that prints the recording. `audio` then names the file that contains the command."""


Sets = dict[str, list[Utterance]]
"""Utterances by set: train, dev, test."""


@dataclass
class Corpus:
    """Hold utterances sorted by id. `folder` is the location named in error messages."""

    folder: Path
    utterances: list[Utterance]

    def __post_init__(self) -> None:
        self.utterances = sorted(self.utterances, key=lambda utterance: utterance.id)
        self.by_id = {utterance.id: utterance for utterance in self.utterances}
        self.speakers: dict[str, list[Utterance]] = {}
        for utterance in self.utterances:
            self.speakers.setdefault(utterance.speaker, []).append(utterance)

    def __len__(self) -> int:
        return len(self.utterances)

    def subset(self, keep: Callable[[Utterance], bool]) -> Corpus:
        """Return a corpus of the utterances for which `keep` is true."""
        return Corpus(self.folder, [utterance for utterance in self.utterances if keep(utterance)])
