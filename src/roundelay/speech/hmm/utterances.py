"""Selection of the utterances of a corpus that have features and pronunciations."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from roundelay.errors import DataError
from roundelay.speech.hmm.viterbi import Array

if TYPE_CHECKING:
    from roundelay.speech.corpora.kaldi_dir import Corpus, Utterance
    from roundelay.speech.hmm.lexicon import Lexicon

OnMissing = Literal["error", "skip"]


class FeatureSource(Protocol):
    """The part of a feature store that training and alignment need."""

    @property
    def ids(self) -> list[str]: ...

    def frames(self, id: str) -> int: ...

    def static(self, id: str) -> Array: ...


@dataclass
class UtteranceSelection:
    """The usable utterances of a corpus, and the reason for each skipped one."""

    usable: list[Utterance] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    unknown_words: Counter[str] = field(default_factory=Counter)
    """For utterances skipped because of a word without pronunciation: the first such word."""


def select_utterances(
    store: FeatureSource, corpus: Corpus, lexicon: Lexicon, on_missing: OnMissing = "error"
) -> UtteranceSelection:
    """Split a corpus into usable and skipped utterances.

    on_missing: 'error' raises a DataError for a word without pronunciation, 'skip' skips its utterance. Utterances without
    features are always skipped.
    """
    have_features = set(store.ids)
    selection = UtteranceSelection()
    for utterance in corpus.utterances:
        word = next((word for word in utterance.words if not lexicon.entries.get(word)), None)
        if word is not None and on_missing == "error":
            raise DataError(
                f"the word '{word}' has no pronunciation",
                where=f"utterance {utterance.id} of {corpus.folder}",
                hint="add it to the lexicon, or skip utterances with unknown words (on_missing='skip')",
            )
        if word is not None:
            selection.unknown_words[word] += 1
            selection.skipped[utterance.id] = f"the word '{word}' has no pronunciation"
        elif utterance.id not in have_features:
            selection.skipped[utterance.id] = "it has no features"
        else:
            selection.usable.append(utterance)
    return selection


def summarize_skipped(skipped: dict[str, str]) -> str:
    """Return the number of skipped utterances with the reason for the first one."""
    id, reason = next(iter(skipped.items()))
    return f"{len(skipped)} skipped, for example {id} ({reason})"
