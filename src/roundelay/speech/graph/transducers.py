"""The two transducers that say what can be spoken: L, from phones to words, and G, the n-gram model over words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import kaldifst

from roundelay.errors import DataError
from roundelay.speech.graph.ngram import BEGIN, END, LOWEST, Gram, Ngram

SILENCE_INDEX = 0
EPSILON = 0

Entries = Mapping[str, Sequence[tuple[Sequence[str], float]]]
"""Words with their pronunciations and the probability of each."""


class Symbols:
    """Numbers of phones, words and disambiguation symbols, and the pronunciations in these numbers."""

    def __init__(self, phones: Sequence[str], entries: Entries, ngram: Ngram) -> None:
        predicted = {gram[0] for gram, p in ngram.probabilities[0].items() if p > LOWEST} - {BEGIN, END}
        known = sorted(word for word in predicted if entries.get(word))
        self.left_out = sorted(predicted - set(known))
        if not known:
            raise DataError(
                "no word of the language model has a pronunciation",
                where=f"{len(predicted)} words, for example {', '.join(repr(w) for w in sorted(predicted)[:3])}",
                hint="check that the lexicon and the text use the same case",
            )
        self.words = {word: number for number, word in enumerate(known, 1)}
        self.backoff_word = len(known) + 1
        self.phones = {phone: index + 1 for index, phone in enumerate(phones)}
        self.silence = SILENCE_INDEX + 1
        self.pronunciations = [
            (number, tuple(self._phone(phone, word) for phone in said), self._cost(probability, word))
            for word, number in self.words.items()
            for said, probability in entries[word]
        ]
        self.marks = self._homophone_marks()
        first = len(phones) + 1
        self.backoff = first
        self.after_silence = first + 1
        self._first_mark = first + 2
        self.disambiguators = list(range(first, first + 2 + max(self.marks, default=0)))

    def mark(self, number: int) -> int:
        """The symbol that tells the n-th of several words that sound alike, or begin alike."""
        return self._first_mark + number - 1

    def _phone(self, phone: str, word: str) -> int:
        if phone not in self.phones:
            raise DataError(
                f"the model does not know phone '{phone}' of the word '{word}'",
                hint="use the lexicon the model was trained with",
            )
        return self.phones[phone]

    @staticmethod
    def _cost(probability: float, word: str) -> float:
        if not 0 < probability <= 1.0001:
            raise DataError(f"a pronunciation of '{word}' has probability {probability}", hint="give one between 0 and 1")
        return -math.log(probability)

    def _homophone_marks(self) -> list[int]:
        """0 for a pronunciation no other equals or continues, else its number among its equals."""
        spoken = Counter(phones for _, phones, _ in self.pronunciations)
        if () in spoken:
            word = next(number for number, phones, _ in self.pronunciations if not phones)
            name = next(w for w, number in self.words.items() if number == word)
            raise DataError(f"the word '{name}' has an empty pronunciation", hint="give it phones, or remove it")
        begun = {phones[:n] for phones in spoken for n in range(1, len(phones))}
        used: Counter[tuple[int, ...]] = Counter()
        marks = []
        for _, phones, _ in self.pronunciations:
            if spoken[phones] > 1 or phones in begun:
                used[phones] += 1
            marks.append(used[phones])
        return marks

    def table(self) -> str:
        """words.txt as Kaldi writes it."""
        names = ["<eps>", *self.words, "#0", BEGIN, END]
        return "".join(f"{name} {number}\n" for number, name in enumerate(names))


class Builder:
    """A transducer under construction; its first state is the start."""

    def __init__(self) -> None:
        self.fst = kaldifst.StdVectorFst()
        self.fst.start = self.state()

    def state(self) -> int:
        return int(self.fst.add_state())

    def arc(self, source: int, reads: int, writes: int, cost: float, target: int) -> None:
        self.fst.add_arc(source, kaldifst.StdArc(reads, writes, cost, target))

    def final(self, state: int, cost: float = 0.0) -> None:
        self.fst.set_final(state, cost)


def lexicon_fst(symbols: Symbols, pause: float) -> Any:
    made = Builder()
    with_pause, without = -math.log(pause), -math.log1p(-pause)
    between, quiet, heard = made.state(), made.state(), made.state()
    made.arc(0, EPSILON, EPSILON, without, between)
    made.arc(0, EPSILON, EPSILON, with_pause, quiet)
    made.arc(quiet, symbols.silence, EPSILON, 0.0, heard)
    made.arc(heard, symbols.after_silence, EPSILON, 0.0, between)
    made.arc(between, symbols.backoff, symbols.backoff_word, 0.0, between)
    made.final(between)
    for (word, phones, cost), mark in zip(symbols.pronunciations, symbols.marks, strict=True):
        spelled = [*phones, symbols.mark(mark)] if mark else list(phones)
        place, writes = between, word
        for symbol in spelled[:-1]:
            after = made.state()
            made.arc(place, symbol, writes, cost, after)
            place, writes, cost = after, EPSILON, 0.0
        made.arc(place, spelled[-1], writes, cost + without, between)
        made.arc(place, spelled[-1], writes, cost + with_pause, quiet)
    return made.fst


def grammar_fst(ngram: Ngram, symbols: Symbols) -> Any:
    """Histories as states. A history nothing continues is skipped, its back-off weight paid on the way.

    Backing off is allowed everywhere, as in Kaldi: exact up to bigrams of an interpolated model, while from trigrams on a
    sentence can be a little more likely by way of a shorter history than the model says."""
    histories: set[Gram] = {(), (BEGIN,)} | {gram[:-1] for table in ngram.probabilities[1:] for gram in table}
    made = Builder()
    place: dict[Gram, int] = {(BEGIN,): 0}
    for history in sorted(histories - {(BEGIN,)}):
        if all(word in symbols.words or word == BEGIN for word in history):
            place[history] = made.state()

    def known_suffix(gram: Gram) -> tuple[int, float]:
        gram, cost = gram[max(0, len(gram) - ngram.order + 1) :], 0.0
        while gram not in place:
            cost += _cost(ngram.backoffs.get(gram, 0.0))
            gram = gram[1:]
        return place[gram], cost

    for table in ngram.probabilities:
        for gram, probability in table.items():
            history, word = gram[:-1], gram[-1]
            if history not in place or probability <= LOWEST:
                continue
            if word == END:
                made.final(place[history], _cost(probability))
            elif word in symbols.words:
                target, skipped = known_suffix(gram)
                number = symbols.words[word]
                made.arc(place[history], number, number, _cost(probability) + skipped, target)
    for history, state in place.items():
        weight = ngram.backoffs.get(history, 0.0)
        if history and weight > LOWEST:
            target, skipped = known_suffix(history[1:])
            made.arc(state, symbols.backoff_word, EPSILON, _cost(weight) + skipped, target)
    kaldifst.connect(made.fst)
    if made.fst.start < 0:
        raise DataError("the language model allows no sentence", hint="check that it predicts </s>")
    return made.fst


def _cost(log10: float) -> float:
    return -log10 * math.log(10)
