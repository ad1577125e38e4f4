"""A small acoustic model and exhaustive search, the references for decoding graph and decoder."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from roundelay.speech.graph.ngram import BEGIN, END, Ngram

Entries = dict[str, list[tuple[tuple[str, ...], float]]]


@dataclass
class Pronounced:
    """A lexicon: words with their pronunciations."""

    entries: Entries


@dataclass
class TiedModel:
    """Phones (0 is silence) whose states are tied by any function of the context."""

    lexicon_phones: list[str]
    num_pdfs: int
    context: int
    self_loop: np.ndarray
    tying: Callable[[int, int, int, int], int]
    states_per_phone: int = 3
    silence_states: int = 3
    silence_probability: float = 0.5

    def states(self, phone: int) -> int:
        return self.silence_states if phone == 0 else self.states_per_phone

    def pdf(self, left: int, phone: int, right: int, state: int) -> int:
        return self.tying(left, phone, right, state)


def phone_strings(model: TiedModel, entries: Entries, words: Sequence[str]) -> list[tuple[list[int], float]]:
    """Return all phone sequences of the words, with optional silence, and the log of their probability."""
    index = {phone: n for n, phone in enumerate(model.lexicon_phones)}
    p = model.silence_probability
    sequences = []
    for choice in itertools.product(*(entries[word] for word in words)):
        for pauses in itertools.product((False, True), repeat=len(words) + 1):
            phones, log = [], 0.0
            for n, pause in enumerate(pauses):
                log += math.log(p if pause else 1 - p)
                phones += [0] if pause else []
                if n < len(words):
                    phones += [index[phone] for phone in choice[n][0]]
                    log += math.log(choice[n][1])
            sequences.append((phones, log))
    return sequences


def best_alignment(model: TiedModel, phones: Sequence[int], scores: np.ndarray) -> float:
    """Return the best log score of a left-to-right sequence of states with at least one frame each, or -inf."""
    pdfs = []
    for n, phone in enumerate(phones):
        left, right = (phones[n - 1] if n else 0), (phones[n + 1] if n + 1 < len(phones) else 0)
        if model.context == 1:
            left = right = 0
        pdfs += [model.pdf(left, phone, right, state) for state in range(model.states(phone))]
    if not pdfs or len(pdfs) > len(scores):
        return -math.inf
    with np.errstate(divide="ignore"):
        stay, leave = np.log(model.self_loop), np.log(1 - model.self_loop)
    now = np.full(len(pdfs), -np.inf)
    now[0] = scores[0, pdfs[0]]
    for frame in scores[1:]:
        before = np.concatenate([[-np.inf], now[:-1] + leave[pdfs[:-1]]])
        now = np.maximum(now + stay[pdfs], before) + frame[pdfs]
    return float(now[-1] + leave[pdfs[-1]])


def sentence_log10(ngram: Ngram, words: Sequence[str]) -> float:
    """Return log10 of the probability of a sentence, including its end."""
    padded = [BEGIN, *words, END]
    return sum(ngram.log10(padded[i], padded[max(0, i - ngram.order + 1) : i]) for i in range(1, len(padded)))


def graph_log10(ngram: Ngram, words: Sequence[str]) -> float:
    """Return the best log10 of a sentence if backing off is allowed everywhere, as in a graph."""
    context: dict[tuple[str, ...], float] = {(BEGIN,): 0.0}
    for word in [*words, END]:
        after: dict[tuple[str, ...], float] = {}
        for history, log in context.items():
            for skip in range(len(history) + 1):
                rest = history[skip:]
                probability = ngram.probabilities[len(rest)].get((*rest, word)) if len(rest) < ngram.order else None
                if probability is not None:
                    new = (*rest, word)[max(0, len(rest) + 2 - ngram.order) :] if ngram.order > 1 else ()
                    after[new] = max(after.get(new, -math.inf), log + probability)
                log += ngram.backoffs.get(rest, 0.0)
        context = after
    return max(context.values(), default=-math.inf)


def exhaustive(
    model: TiedModel, entries: Entries, ngram: Ngram, scores: np.ndarray, longest: int
) -> list[tuple[float, tuple[str, ...]]]:
    """Return all sentences of at most `longest` words with the score of their best alignment, the best first."""
    sentences = []
    for count in range(longest + 1):
        for words in itertools.product(sorted(entries), repeat=count):
            language = graph_log10(ngram, words) * math.log(10)
            acoustic = max(
                (log + best_alignment(model, phones, scores) for phones, log in phone_strings(model, entries, words))
            )
            if acoustic > -math.inf and language > -math.inf:
                sentences.append((acoustic + language, words))
    return sorted(sentences, key=lambda pair: -pair[0])


def state_path(model: TiedModel, phones: Sequence[int]) -> list[int]:
    """Return the pdfs of a phone sequence, state by state."""
    path = []
    for n, phone in enumerate(phones):
        left, right = (phones[n - 1] if n else 0), (phones[n + 1] if n + 1 < len(phones) else 0)
        path += [model.pdf(left, phone, right, state) for state in range(model.states(phone))]
    return path


def clear_scores(model: TiedModel, entries: Entries, words: Sequence[str], seed: int, gap: float = 12.0) -> np.ndarray:
    """Return scores of an utterance in which the correct pdf is higher by `gap`, with noise of standard deviation 2."""
    rng = np.random.default_rng(seed)
    index = {phone: n for n, phone in enumerate(model.lexicon_phones)}
    phones = [0, *(index[phone] for word in words for phone in entries[word][0][0]), 0]
    pdfs = [pdf for pdf in state_path(model, phones) for _ in range(int(rng.integers(1, 4)))]
    scores = rng.normal(0.0, 2.0, size=(len(pdfs), model.num_pdfs)).astype(np.float32)
    scores[np.arange(len(pdfs)), pdfs] += gap
    return scores


def random_task(words: int, leaves: int, seed: int, context: int = 3) -> tuple[TiedModel, Entries, list[list[str]]]:
    """Return model, lexicon and text of a task of the size of a small recipe: 39 phones, words of 2 to 8 phones."""
    rng = np.random.default_rng(seed)
    phones, frequency = ["SIL", *(f"P{n}" for n in range(39))], rng.dirichlet(np.ones(39))
    names = [f"W{n:04d}" for n in range(words)]
    entries: Entries = {}
    for name in names:
        variants = [tuple(phones[1 + p] for p in rng.choice(39, int(rng.integers(2, 9)), p=frequency)) for _ in range(2)]
        entries[name] = [(variants[0], 1.0), *([(variants[1], 0.5)] if rng.random() < 0.1 else [])]
    per_state = 1 if context == 1 else max(1, (leaves - 3) // 117)
    classes = rng.integers(0, per_state, size=(40, 3, 40))

    def tying(left: int, phone: int, right: int, state: int) -> int:
        if phone == 0:
            return state
        return 3 + ((phone - 1) * 3 + state) * per_state + int(classes[phone, state, right if state == 2 else left])

    pdfs = 3 + 117 * per_state
    model = TiedModel(phones, pdfs, context, rng.uniform(0.4, 0.8, pdfs), tying)
    follow = rng.integers(0, words, size=(words + 1, 12))
    text = []
    for _ in range(20 * words):
        context, sentence = words, []
        for _ in range(int(rng.integers(3, 10))):
            context = int(follow[context, rng.integers(12)]) if rng.random() < 0.95 else int(rng.integers(words))
            sentence.append(names[context])
        text.append(sentence)
    return model, entries, text
