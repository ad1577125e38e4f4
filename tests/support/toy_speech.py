"""A toy language with frames drawn from Gaussians, so that the true alignment of each utterance is available."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from roundelay.speech.corpora.utterance import Corpus, Utterance

Array = np.ndarray[Any, Any]
MELS = 13
STATES = 3


@dataclass
class ToyLexicon:
    entries: dict[str, list[tuple[tuple[str, ...], float]]]

    @property
    def phones(self) -> list[str]:
        return sorted({phone for variants in self.entries.values() for phones, _ in variants for phone in phones})


LEXICON = ToyLexicon(
    {
        "GALE": [(("G", "AH", "L"), 1.0)],
        "LAG": [(("L", "AH", "G"), 1.0)],
        "OLGA": [(("O", "L", "G", "AH"), 1.0)],
        "EITHER": [(("I", "T"), 0.5), (("O", "T"), 0.5)],
        "O": [(("O",), 1.0)],
        "TILT": [(("T", "I", "L", "T"), 1.0)],
        "IGOR": [(("I", "G", "O"), 1.0)],
        "TOLL": [(("T", "O", "L"), 1.0)],
        "ATTIC": [(("AH", "T", "I", "G"), 1.0)],
        "LILO": [(("L", "I", "L", "O"), 1.0)],
    }
)


@dataclass
class Toy:
    """Utterances with their frames, the true spans of their words, and their pronunciations."""

    corpus: Corpus
    statics: dict[str, Array]
    words: dict[str, list[tuple[str, int, int]]]
    pronunciations: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)

    @property
    def ids(self) -> list[str]:
        return sorted(self.statics)

    def frames(self, id: str) -> int:
        return len(self.statics[id])

    def static(self, id: str) -> Array:
        return self.statics[id]


def toy(
    utterances: int, seed: int = 0, *, lexicon: ToyLexicon = LEXICON, context_shift: float = 0.0, noise: float = 0.3
) -> Toy:
    """Return random sentences. With a `context_shift` phones after O have other means than elsewhere."""
    random = np.random.default_rng(seed)
    language_rng = np.random.default_rng(1234)  # the language does not depend on the seed
    sounds = {phone: 1.5 * language_rng.standard_normal((STATES, MELS)) for phone in ["SIL", *lexicon.phones]}
    sounds["SIL"][1:] = sounds["SIL"][0]
    shift = language_rng.standard_normal(MELS)
    corpus, statics, truth, pronunciations = [], {}, {}, {}
    for n in range(utterances):
        id = f"toy-{n:04d}"
        sentence = tuple(random.choice(sorted(lexicon.entries), size=int(random.integers(2, 6))).tolist())
        frames: list[Array] = []
        spans, chosen = [], []
        before = "SIL"
        for word in sentence:
            if random.random() < 0.5:
                frames += _emit(sounds["SIL"], random, noise, 5, 20)
                before = "SIL"
            variants = lexicon.entries[word]
            phones = variants[int(random.integers(len(variants)))][0]
            chosen.append(phones)
            begin = len(frames)
            for phone in phones:
                moved = sounds[phone] + (context_shift * shift if before == "O" else 0.0)
                frames += _emit(moved, random, noise, 2, 6)
                before = phone
            spans.append((word, begin, len(frames)))
        if random.random() < 0.5:
            frames += _emit(sounds["SIL"], random, noise, 5, 20)
        corpus.append(Utterance(id, f"speaker{n % 3}", sentence, Path(f"{id}.wav")))
        statics[id], truth[id], pronunciations[id] = np.array(frames, np.float32), spans, chosen
    return Toy(Corpus(Path("toy"), corpus), statics, truth, pronunciations)


def _emit(states: Array, random: np.random.Generator, noise: float, least: int, most: int) -> list[Array]:
    return [
        mean + noise * random.standard_normal(MELS) for mean in states for _ in range(int(random.integers(least, most + 1)))
    ]
