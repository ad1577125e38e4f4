"""The FSTs L (phones to words) and G (n-gram model over words), and their symbol tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import kaldifst

from roundelay.errors import DataError
from roundelay.speech.graph.ngram import BEGIN, END, LOWEST, Gram, Ngram
from roundelay.speech.hmm.lexicon import SILENCE_INDEX

EPSILON = 0

Entries = Mapping[str, Sequence[tuple[Sequence[str], float]]]
"""Words with their pronunciations and the probability of each."""


class SymbolTables:
    """Labels of phones, words and disambiguation symbols, and the pronunciations as labels.

    Raises DataError if no word has a pronunciation, or a pronunciation is invalid.
    """

    def __init__(self, phones: Sequence[str], entries: Entries, ngram: Ngram) -> None:
        predicted = {gram[0] for gram, p in ngram.probabilities[0].items() if p > LOWEST} - {BEGIN, END}
        pronounceable = sorted(word for word in predicted if entries.get(word))
        self.without_pronunciation = sorted(predicted - set(pronounceable))
        if not pronounceable:
            raise DataError(
                "no word of the language model has a pronunciation",
                where=f"{len(predicted)} words, for example {', '.join(repr(w) for w in sorted(predicted)[:3])}",
                hint="check that the lexicon and the text use the same case",
            )
        self.words = {word: number for number, word in enumerate(pronounceable, 1)}
        self.backoff_word = len(pronounceable) + 1
        self.phones = {phone: index + 1 for index, phone in enumerate(phones)}
        self.silence = SILENCE_INDEX + 1
        self.pronunciations = [
            (number, tuple(self._phone(phone, word) for phone in variant), self._cost(probability, word))
            for word, number in self.words.items()
            for variant, probability in entries[word]
        ]
        self.homophones = self._number_homophones()
        first = len(phones) + 1
        self.backoff = first
        self.after_silence = first + 1
        self._first_homophone = first + 2
        self.disambiguation = list(range(first, first + 2 + max(self.homophones, default=0)))

    def homophone(self, number: int) -> int:
        """Return the disambiguation symbol of the n-th pronunciation among equal ones."""
        return self._first_homophone + number - 1

    def _phone(self, phone: str, word: str) -> int:
        if phone not in self.phones:
            raise DataError(
                f"phone '{phone}' of the word '{word}' is not in the model",
                hint="use the lexicon that the model was trained with",
            )
        return self.phones[phone]

    @staticmethod
    def _cost(probability: float, word: str) -> float:
        if not 0 < probability <= 1.0001:
            raise DataError(
                f"the probability of a pronunciation of '{word}' must be above 0 and at most 1 (got {probability})",
                hint="correct the lexicon",
            )
        return -math.log(probability)

    def _number_homophones(self) -> list[int]:
        """Return 0 for a pronunciation that equals no other and is no prefix of another, else its number among equal ones."""
        count = Counter(phones for _, phones, _ in self.pronunciations)
        if () in count:
            word = next(number for number, phones, _ in self.pronunciations if not phones)
            name = next(w for w, number in self.words.items() if number == word)
            raise DataError(f"the word '{name}' has an empty pronunciation", hint="add phones, or remove the word")
        prefixes = {phones[:n] for phones in count for n in range(1, len(phones))}
        used: Counter[tuple[int, ...]] = Counter()
        numbers = []
        for _, phones, _ in self.pronunciations:
            if count[phones] > 1 or phones in prefixes:
                used[phones] += 1
            numbers.append(used[phones])
        return numbers

    def table(self) -> str:
        """Return the content of Kaldi's words.txt."""
        names = ["<eps>", *self.words, "#0", BEGIN, END]
        return "".join(f"{name} {number}\n" for number, name in enumerate(names))


class FstBuilder:
    """An FST under construction; state 0 is the start."""

    def __init__(self) -> None:
        self.fst = kaldifst.StdVectorFst()
        self.fst.start = self.state()

    def state(self) -> int:
        return int(self.fst.add_state())

    def arc(self, source: int, ilabel: int, olabel: int, weight: float, nextstate: int) -> None:
        self.fst.add_arc(source, kaldifst.StdArc(ilabel, olabel, weight, nextstate))

    def final(self, state: int, weight: float = 0.0) -> None:
        self.fst.set_final(state, weight)


def lexicon_fst(symbols: SymbolTables, silence: float) -> Any:
    """Build L, with optional silence of probability `silence` before the first word and after each word."""
    fst = FstBuilder()
    with_silence, without = -math.log(silence), -math.log1p(-silence)
    loop, before_silence, after_silence = fst.state(), fst.state(), fst.state()
    fst.arc(0, EPSILON, EPSILON, without, loop)
    fst.arc(0, EPSILON, EPSILON, with_silence, before_silence)
    fst.arc(before_silence, symbols.silence, EPSILON, 0.0, after_silence)
    fst.arc(after_silence, symbols.after_silence, EPSILON, 0.0, loop)
    fst.arc(loop, symbols.backoff, symbols.backoff_word, 0.0, loop)
    fst.final(loop)
    for (word, phones, cost), number in zip(symbols.pronunciations, symbols.homophones, strict=True):
        labels = [*phones, symbols.homophone(number)] if number else list(phones)
        state, olabel = loop, word
        for ilabel in labels[:-1]:
            following = fst.state()
            fst.arc(state, ilabel, olabel, cost, following)
            state, olabel, cost = following, EPSILON, 0.0
        fst.arc(state, labels[-1], olabel, cost + without, loop)
        fst.arc(state, labels[-1], olabel, cost + with_silence, before_silence)
    return fst.fst


def grammar_fst(ngram: Ngram, symbols: SymbolTables) -> Any:
    """Build G, with histories as states. A history without continuations has no state; arcs to it include its back-off weight.

    Backing off is allowed everywhere, as in Kaldi. This is exact for interpolated models up to bigrams. With longer histories a
    sentence can be slightly more likely than in the model, through a shorter history. Raises DataError if no sentence ends.
    """
    histories: set[Gram] = {(), (BEGIN,)} | {gram[:-1] for table in ngram.probabilities[1:] for gram in table}
    fst = FstBuilder()
    states: dict[Gram, int] = {(BEGIN,): 0}
    for history in sorted(histories - {(BEGIN,)}):
        if all(word in symbols.words or word == BEGIN for word in history):
            states[history] = fst.state()

    def longest_suffix(gram: Gram) -> tuple[int, float]:
        gram, cost = gram[max(0, len(gram) - ngram.order + 1) :], 0.0
        while gram not in states:
            cost += _cost(ngram.backoffs.get(gram, 0.0))
            gram = gram[1:]
        return states[gram], cost

    for table in ngram.probabilities:
        for gram, probability in table.items():
            history, word = gram[:-1], gram[-1]
            if history not in states or probability <= LOWEST:
                continue
            if word == END:
                fst.final(states[history], _cost(probability))
            elif word in symbols.words:
                target, backoff = longest_suffix(gram)
                number = symbols.words[word]
                fst.arc(states[history], number, number, _cost(probability) + backoff, target)
    for history, state in states.items():
        weight = ngram.backoffs.get(history, 0.0)
        if history and weight > LOWEST:
            target, backoff = longest_suffix(history[1:])
            fst.arc(state, symbols.backoff_word, EPSILON, _cost(weight) + backoff, target)
    kaldifst.connect(fst.fst)
    if fst.fst.start < 0:
        raise DataError("the language model accepts no sentence", hint="check that it predicts </s>")
    return fst.fst


def _cost(log10: float) -> float:
    return -log10 * math.log(10)
