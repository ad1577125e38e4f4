"""N-gram language models: interpolated Kneser-Ney from text, ARPA files in and out, perplexity.

    p(w|h) = max(c(hw) - D(c(hw)), 0) / c(h·) + γ(h) p(w|h'),        γ(h) = Σ_i D_i N_i(h) / c(h·)

where h' is h without its first word, c the count at the highest order and the number of different words to the left
below it (raw counts after <s>, which nothing precedes), and the lowest order ends in 1/|V|: every word of the
vocabulary has a probability after every history, and they sum to one. D(1), D(2), D(3+) are those of Chen and Goodman
(1999, "modified"). Small or odd texts give counts of counts that yield no valid triple; then one discount serves all
counts, n1/(n1+2 n2), and ½ where that is undefined too. `Ngram.discounts` tells which were used.

An ARPA file says exactly this model: the interpolated probabilities as n-grams, γ as the back-off weights.

Words outside the vocabulary: estimate() replaces them by <unk>, which then is a word like any other, and lists them in
`outside`; a model that never met one has no <unk>. measure() counts the words it cannot predict and leaves them out of
the perplexity, saying how many there were.
"""

from __future__ import annotations

import gzip
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from roundelay.errors import DataError, UsageError

BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"
LOWEST = -99.0
"""What ARPA files write for a probability of zero; <s> has it, since it is never predicted. As the back-off weight of a history
it says that nothing else can follow."""
HIGHEST_ORDER = 4
FALLBACK_DISCOUNT = 0.5

Gram = tuple[str, ...]


@dataclass
class Ngram:
    """log10 probabilities of n-grams and log10 back-off weights of histories."""

    order: int
    probabilities: list[dict[Gram, float]]
    """By order, from 1."""
    backoffs: dict[Gram, float]
    discounts: list[tuple[float, float, float]] = field(default_factory=list)
    outside: Counter[str] = field(default_factory=Counter)

    @property
    def vocabulary(self) -> set[str]:
        """Everything it can predict: the words, <unk> if it has one, and the end of the sentence."""
        return {gram[0] for gram in self.probabilities[0]} - {BEGIN}

    def log10(self, word: str, history: Sequence[str]) -> float:
        """log10 p(word | history), backing off as ARPA files are meant; -inf for a word it does not know."""
        context = tuple(history)[max(0, len(history) - self.order + 1) :]
        weight = 0.0
        while True:
            found = self.probabilities[len(context)].get((*context, word))
            if found is not None:
                return weight + found
            if not context:
                return -math.inf
            weight += self.backoffs.get(context, 0.0)
            context = context[1:]

    def sentence_log10(self, words: Sequence[str]) -> float:
        """log10 of the probability of a whole sentence, its end included."""
        padded = [BEGIN, *words, END]
        return sum(self.log10(padded[i], padded[max(0, i - self.order + 1) : i]) for i in range(1, len(padded)))

    def measure(self, sentences: Iterable[Sequence[str]]) -> Fit:
        known, has_unknown = self.vocabulary, (UNKNOWN,) in self.probabilities[0]
        total, counted, lines, outside = 0.0, 0, 0, Counter[str]()
        for words in sentences:
            lines += 1
            outside.update(word for word in words if word not in known)
            padded = [BEGIN, *(word if word in known else UNKNOWN for word in words), END]
            for i in range(1, len(padded)):
                if padded[i] == UNKNOWN and not has_unknown:
                    continue
                total += self.log10(padded[i], padded[max(0, i - self.order + 1) : i])
                counted += 1
        return Fit(10 ** (-total / counted) if counted else math.nan, counted, lines, outside)

    def perplexity(self, sentences: Iterable[Sequence[str]]) -> float:
        """Per word and sentence end; see measure() for the words it could not predict."""
        return self.measure(sentences).perplexity

    def write_arpa(self, path: str | Path) -> None:
        """Every digit is written, so that the file reads back equal."""
        with _open(path, "wt") as out:
            out.write("\\data\\\n")
            for n, grams in enumerate(self.probabilities, 1):
                out.write(f"ngram {n}={len(grams)}\n")
            for n, grams in enumerate(self.probabilities, 1):
                out.write(f"\n\\{n}-grams:\n")
                for gram in sorted(grams):
                    backoff = f"\t{self.backoffs[gram]!r}" if gram in self.backoffs else ""
                    out.write(f"{grams[gram]!r}\t{' '.join(gram)}{backoff}\n")
            out.write("\n\\end\\\n")


@dataclass(frozen=True)
class Fit:
    """How well a model predicts a text."""

    perplexity: float
    predictions: int
    sentences: int
    outside: Counter[str]
    """Words of the text the model does not know; without an <unk> in the model they are not in the perplexity."""


# ---------------------------------------------------------------------------------------------------- estimation


def estimate(sentences: Iterable[Sequence[str]], order: int = 2, vocabulary: Iterable[str] | None = None) -> Ngram:
    """Interpolated Kneser-Ney. The vocabulary defaults to the words of the text; its other words get their share of 1/|V|."""
    if not 1 <= order <= HIGHEST_ORDER:
        raise UsageError(f"an n-gram model of order {order}", where="order", hint=f"choose 1 to {HIGHEST_ORDER}")
    given = None if vocabulary is None else set(vocabulary) - {BEGIN, END}
    raw, outside = _count(sentences, order, given)
    words = {gram[0] for gram in raw[0]} | (given or set()) | {END}
    words.discard(BEGIN)
    if words == {END}:
        raise DataError("no word to estimate a language model from", hint="give a text, or at least a vocabulary")
    counts = _continuations(raw)
    discounts = [_discounts(table) for table in counts]
    model = _interpolate(counts, discounts, words)
    model.outside = outside
    return model


def one_of(words: Iterable[str]) -> Ngram:
    """A sentence is one of these words, all equally likely: nothing, or two of them, cannot be said."""
    chosen = sorted(set(words))
    if not chosen:
        raise DataError("no word to choose from", hint="give at least one")
    share = -math.log10(len(chosen))
    unigrams: dict[Gram, float] = {**{(word,): share for word in chosen}, (END,): share, (BEGIN,): LOWEST}
    bigrams: dict[Gram, float] = {**{(BEGIN, word): share for word in chosen}, **{(word, END): 0.0 for word in chosen}}
    return Ngram(2, [unigrams, bigrams], {(history,): LOWEST for history in (BEGIN, *chosen)})


def _count(
    sentences: Iterable[Sequence[str]], order: int, vocabulary: set[str] | None
) -> tuple[list[dict[Gram, int]], Counter[str]]:
    """Raw counts of all n-grams up to the order; <s> is history only."""
    tables: list[dict[Gram, int]] = [defaultdict(int) for _ in range(order)]
    outside: Counter[str] = Counter()
    for number, sentence in enumerate(sentences, 1):
        marked = {BEGIN, END}.intersection(sentence)
        if marked:
            raise DataError(
                f"{marked.pop()} stands inside a sentence",
                where=f"sentence {number}",
                hint="leave the marks out: they are added",
            )
        if vocabulary is not None:
            outside.update(word for word in sentence if word not in vocabulary)
            sentence = [word if word in vocabulary else UNKNOWN for word in sentence]
        padded = (BEGIN, *sentence, END)
        for end in range(1, len(padded)):
            for n in range(1, min(order, end + 1) + 1):
                tables[n - 1][padded[end + 1 - n : end + 1]] += 1
    return [dict(table) for table in tables], outside


def _continuations(raw: list[dict[Gram, int]]) -> list[dict[Gram, int]]:
    """Below the highest order: in how many different contexts a gram was seen, instead of how often."""
    tables = list(raw)
    for n in range(len(raw) - 1):
        kinds: dict[Gram, int] = defaultdict(int)
        for gram in raw[n + 1]:
            kinds[gram[1:]] += 1
        tables[n] = {gram: count if gram[0] == BEGIN else kinds[gram] for gram, count in raw[n].items()}
    return tables


def _discounts(table: Mapping[Gram, int]) -> tuple[float, float, float]:
    of = Counter(table.values())
    n1, n2, n3, n4 = (of[k] for k in (1, 2, 3, 4))
    if not n1 or not n2:
        return FALLBACK_DISCOUNT, FALLBACK_DISCOUNT, FALLBACK_DISCOUNT
    single = n1 / (n1 + 2 * n2)
    if n3:
        triple = (1 - 2 * single * n2 / n1, 2 - 3 * single * n3 / n2, 3 - 4 * single * n4 / n3)
        if all(0 < discount < k for k, discount in enumerate(triple, 1)):
            return triple
    return single, single, single


def _interpolate(counts: list[dict[Gram, int]], discounts: list[tuple[float, float, float]], words: set[str]) -> Ngram:
    lower: dict[Gram, float] = {(word,): 1.0 / len(words) for word in words}
    tables: list[dict[Gram, float]] = []
    backoffs: dict[Gram, float] = {}
    for n, (table, discount) in enumerate(zip(counts, discounts, strict=True), 1):
        mass: dict[Gram, float] = defaultdict(float)
        kept_back: dict[Gram, float] = defaultdict(float)
        for gram, count in table.items():
            mass[gram[:-1]] += count
            kept_back[gram[:-1]] += discount[min(count, 3) - 1]
        share = {history: kept_back[history] / mass[history] for history in mass}
        if n == 1:
            current = {gram: share.get((), 1.0) * p for gram, p in lower.items()}
            for gram, count in table.items():
                current[gram] += (count - discount[min(count, 3) - 1]) / mass[()]
        else:
            current = {
                gram: (count - discount[min(count, 3) - 1]) / mass[gram[:-1]] + share[gram[:-1]] * lower[gram[1:]]
                for gram, count in table.items()
            }
            backoffs.update((history, math.log10(gamma)) for history, gamma in share.items())
        tables.append({gram: math.log10(p) for gram, p in current.items()})
        lower = current
    tables[0][(BEGIN,)] = LOWEST
    return Ngram(len(counts), tables, backoffs, discounts)


# ------------------------------------------------------------------------------------------------------ ARPA files


def read_arpa(path: str | Path) -> Ngram:
    """Any ARPA file, also compressed with gzip: text before \\data\\, blanks or tabs, missing back-off weights."""
    reader = _ArpaReader(str(path))
    try:
        with _open(path, "rt") as lines:
            return reader.read(lines)
    except OSError as error:
        raise DataError(
            f"the language model cannot be read: {error.strerror or error}", where=str(path), hint="check the path"
        ) from None
    except UnicodeDecodeError:
        raise DataError(
            "the language model is not UTF-8", where=f"{path}, after line {reader.line}", hint="convert the file"
        ) from None
    except EOFError:
        raise DataError("the compressed file ends early", where=str(path), hint="copy it again") from None


class _ArpaReader:
    def __init__(self, path: str) -> None:
        self.path, self.line = path, 0

    def read(self, lines: Iterable[str]) -> Ngram:
        source = self._numbered(lines)
        promised = self._header(source)
        tables: list[dict[Gram, float]] = [{} for _ in promised]
        backoffs: dict[Gram, float] = {}
        section, ended = 1, False
        for text in source:
            if text == "\\end\\":
                ended = True
                break
            if text.startswith("\\") and text.endswith("-grams:") and text[1:-7].isdigit():
                section = int(text[1:-7])
                if not 1 <= section <= len(promised):
                    raise self._bad(f"a section of {section}-grams that \\data\\ does not announce")
                continue
            self._gram(text.split(), section, tables[section - 1], backoffs)
        if not ended:
            raise self._bad("the file ends without \\end\\", "copy it again, it is cut off")
        for n, (table, count) in enumerate(zip(tables, promised, strict=True), 1):
            if len(table) != count:
                raise self._bad(f"{len(table)} {n}-grams where \\data\\ announces {count}")
        return Ngram(len(promised), tables, backoffs)

    def _numbered(self, lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            self.line += 1
            if text := line.strip():
                yield text

    def _header(self, source: Iterator[str]) -> list[int]:
        for text in source:
            if text == "\\data\\":
                break
        else:
            raise self._bad("no line \\data\\: not an ARPA file")
        promised: list[int] = []
        for text in source:
            if text.startswith("\\1-grams:"):
                break
            name, _, count = text.removeprefix("ngram").partition("=")
            if not text.startswith("ngram") or name.strip() != str(len(promised) + 1) or not count.strip().isdigit():
                raise self._bad(f"'{text}' where 'ngram {len(promised) + 1}=count' is due")
            promised.append(int(count))
        if not promised:
            raise self._bad("\\data\\ announces no n-grams")
        return promised

    def _gram(self, fields: list[str], n: int, table: dict[Gram, float], backoffs: dict[Gram, float]) -> None:
        if len(fields) not in (n + 1, n + 2):
            raise self._bad(f"{len(fields)} fields where a probability, {n} words and perhaps a back-off weight are due")
        gram = tuple(fields[1 : n + 1])
        try:
            probability = float(fields[0])
            backoff = float(fields[n + 1]) if len(fields) == n + 2 else None
        except ValueError:
            raise self._bad(f"a number is due: '{' '.join(fields)}'") from None
        if (
            math.isnan(probability)
            or probability > 1e-4
            or (backoff is not None and (math.isnan(backoff) or backoff == math.inf))
        ):
            raise self._bad(f"not a log10 probability or weight: '{' '.join(fields)}'")
        if gram in table:
            raise self._bad(f"'{' '.join(gram)}' occurs twice")
        table[gram] = min(probability, 0.0)
        if backoff is not None:
            backoffs[gram] = backoff

    def _bad(self, what: str, do: str = "check the file, or estimate the model again") -> DataError:
        return DataError(what, where=f"{self.path}, line {self.line}", hint=do)


def _open(path: str | Path, mode: str) -> IO[str]:
    if str(path).endswith(".gz"):
        return gzip.open(path, mode, encoding="utf-8")  # type: ignore[return-value]
    return open(path, mode, encoding="utf-8")
