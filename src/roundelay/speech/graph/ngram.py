"""N-gram language models: interpolated Kneser-Ney estimation, ARPA files, perplexity.

    p(w|h) = max(c(hw) - D(c(hw)), 0) / c(h·) + γ(h) p(w|h'),        γ(h) = Σ_i D_i N_i(h) / c(h·)

where h' is h without its first word. c is the count at the highest order. At lower orders c is the number of different words to
the left (the raw count after <s>, which has no left context). The lowest order is interpolated with 1/|V|, so every word of the
vocabulary has a probability after every history, and they sum to one. D(1), D(2), D(3+) are those of Chen and Goodman (1999,
"modified"). If the counts of counts yield no valid triple, all counts use one discount, n1/(n1+2 n2), or ½ if it is undefined.
`Ngram.discounts` contains the discounts in use.

An ARPA file represents this model exactly: the interpolated probabilities are its n-grams, γ its back-off weights.

Out-of-vocabulary words: estimate() replaces them by <unk>, which is then an ordinary word, and counts them in `oov`. A model
without such words has no <unk>. measure() counts the words that the model cannot predict and excludes them from the perplexity.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from roundelay.errors import DataError, UsageError

BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"
LOWEST = -99.0
"""log10 of a zero probability in ARPA files. <s>, which is never predicted, has it. As the back-off weight of a history it
means that only the listed words can follow."""
MAX_ORDER = 4
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
    oov: Counter[str] = field(default_factory=Counter)

    @property
    def vocabulary(self) -> set[str]:
        """All symbols that the model predicts: the words, <unk> if it has one, and </s>."""
        return {gram[0] for gram in self.probabilities[0]} - {BEGIN}

    def log10(self, word: str, history: Sequence[str]) -> float:
        """Return log10 p(word | history), with back-off; -inf for an unknown word."""
        context = tuple(history)[max(0, len(history) - self.order + 1) :]
        weight = 0.0
        while True:
            probability = self.probabilities[len(context)].get((*context, word))
            if probability is not None:
                return weight + probability
            if not context:
                return -math.inf
            weight += self.backoffs.get(context, 0.0)
            context = context[1:]

    def measure(self, sentences: Iterable[Sequence[str]]) -> TextFit:
        """Measure how well the model predicts a text."""
        vocabulary, has_unknown = self.vocabulary, (UNKNOWN,) in self.probabilities[0]
        total, counted, lines, oov = 0.0, 0, 0, Counter[str]()
        for words in sentences:
            lines += 1
            oov.update(word for word in words if word not in vocabulary)
            padded = [BEGIN, *(word if word in vocabulary else UNKNOWN for word in words), END]
            for i in range(1, len(padded)):
                if padded[i] == UNKNOWN and not has_unknown:
                    continue
                total += self.log10(padded[i], padded[max(0, i - self.order + 1) : i])
                counted += 1
        return TextFit(10 ** (-total / counted) if counted else math.nan, counted, lines, oov)

    def perplexity(self, sentences: Iterable[Sequence[str]]) -> float:
        """Return the perplexity per word and sentence end; see measure() for words that the model cannot predict."""
        return self.measure(sentences).perplexity

    def write_arpa(self, path: str | Path) -> None:
        """Write an ARPA file (gzip if the name ends in .gz) with all digits, so that reading it returns an equal model."""
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
class TextFit:
    """How well a model predicts a text."""

    perplexity: float
    predictions: int
    sentences: int
    oov: Counter[str]
    """Out-of-vocabulary words of the text; if the model has no <unk>, they are not part of the perplexity."""


# ---------------------------------------------------------------------------------------------------- estimation


def estimate(sentences: Iterable[Sequence[str]], order: int = 2, vocabulary: Iterable[str] | None = None) -> Ngram:
    """Estimate an interpolated Kneser-Ney model.

    vocabulary: the words of the text by default; words that are not in the text get their share of 1/|V|. Raises UsageError for
    an order outside 1 … MAX_ORDER, DataError without any word.
    """
    if not 1 <= order <= MAX_ORDER:
        raise UsageError(f"order must be from 1 to {MAX_ORDER} (got {order})", where="order", hint=f"choose 1 to {MAX_ORDER}")
    closed = None if vocabulary is None else set(vocabulary) - {BEGIN, END}
    raw, oov = _count(sentences, order, closed)
    words = {gram[0] for gram in raw[0]} | (closed or set()) | {END}
    words.discard(BEGIN)
    if words == {END}:
        raise DataError("there is no word to estimate a language model from", hint="pass a text or a vocabulary")
    counts = _continuations(raw)
    discounts = [_discounts(table) for table in counts]
    model = _interpolate(counts, discounts, words)
    model.oov = oov
    return model


def single_word_ngram(words: Iterable[str]) -> Ngram:
    """Return a bigram model whose sentences are exactly one of these words, all equally likely."""
    unique = sorted(set(words))
    if not unique:
        raise DataError("there is no word for a language model", hint="pass at least one")
    share = -math.log10(len(unique))
    unigrams: dict[Gram, float] = {**{(word,): share for word in unique}, (END,): share, (BEGIN,): LOWEST}
    bigrams: dict[Gram, float] = {**{(BEGIN, word): share for word in unique}, **{(word, END): 0.0 for word in unique}}
    return Ngram(2, [unigrams, bigrams], {(history,): LOWEST for history in (BEGIN, *unique)})


def _count(
    sentences: Iterable[Sequence[str]], order: int, vocabulary: set[str] | None
) -> tuple[list[dict[Gram, int]], Counter[str]]:
    """Return raw counts of all n-grams up to the order, and out-of-vocabulary words; <s> occurs in histories only."""
    tables: list[dict[Gram, int]] = [defaultdict(int) for _ in range(order)]
    oov: Counter[str] = Counter()
    for number, sentence in enumerate(sentences, 1):
        markers = {BEGIN, END}.intersection(sentence)
        if markers:
            raise DataError(
                f"a sentence must not contain {markers.pop()}",
                where=f"sentence {number}",
                hint="remove the markers; they are added automatically",
            )
        if vocabulary is not None:
            oov.update(word for word in sentence if word not in vocabulary)
            sentence = [word if word in vocabulary else UNKNOWN for word in sentence]
        padded = (BEGIN, *sentence, END)
        for end in range(1, len(padded)):
            for n in range(1, min(order, end + 1) + 1):
                tables[n - 1][padded[end + 1 - n : end + 1]] += 1
    return [dict(table) for table in tables], oov


def _continuations(raw: list[dict[Gram, int]]) -> list[dict[Gram, int]]:
    """Replace counts below the highest order by the number of different words to the left."""
    tables = list(raw)
    for n in range(len(raw) - 1):
        left_words: dict[Gram, int] = defaultdict(int)
        for gram in raw[n + 1]:
            left_words[gram[1:]] += 1
        tables[n] = {gram: count if gram[0] == BEGIN else left_words[gram] for gram, count in raw[n].items()}
    return tables


def _discounts(table: Mapping[Gram, int]) -> tuple[float, float, float]:
    counts = Counter(table.values())
    n1, n2, n3, n4 = (counts[k] for k in (1, 2, 3, 4))
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
        discounted: dict[Gram, float] = defaultdict(float)
        for gram, count in table.items():
            mass[gram[:-1]] += count
            discounted[gram[:-1]] += discount[min(count, 3) - 1]
        share = {history: discounted[history] / mass[history] for history in mass}
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
    """Read an ARPA file, also compressed with gzip; DataError names the line of a mistake.

    Text before \\data\\, blanks instead of tabs and missing back-off weights are accepted.
    """
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
    except (EOFError, zlib.error):
        raise DataError("the compressed file is truncated or damaged", where=str(path), hint="copy it again") from None
    except ValueError as error:
        raise DataError(f"the language model cannot be read: {error}", where=str(path), hint="check the path") from None


class _ArpaReader:
    def __init__(self, path: str) -> None:
        self.path, self.line = path, 0

    def read(self, lines: Iterable[str]) -> Ngram:
        source = self._numbered(lines)
        announced = self._header(source)
        tables: list[dict[Gram, float]] = [{} for _ in announced]
        backoffs: dict[Gram, float] = {}
        section, ended = 1, False
        for text in source:
            if text == "\\end\\":
                ended = True
                break
            if text.startswith("\\") and text.endswith("-grams:") and text[1:-7].isdecimal() and len(text) < 20:
                section = int(text[1:-7])
                if not 1 <= section <= len(announced):
                    raise self._bad(f"\\data\\ does not announce {section}-grams")
                continue
            self._gram(text.split(), section, tables[section - 1], backoffs)
        if not ended:
            raise self._bad("the file ends without \\end\\", "copy it again: it is truncated")
        for n, (table, count) in enumerate(zip(tables, announced, strict=True), 1):
            if len(table) != count:
                raise self._bad(f"\\data\\ announces {count} {n}-grams, the file has {len(table)}")
        return Ngram(len(announced), tables, backoffs)

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
            raise self._bad("not an ARPA file: there is no line \\data\\")
        announced: list[int] = []
        for text in source:
            if text.startswith("\\1-grams:"):
                break
            name, _, count = text.removeprefix("ngram").partition("=")
            if (
                not text.startswith("ngram")
                or name.strip() != str(len(announced) + 1)
                or not count.strip().isdecimal()
                or len(count) > 18
            ):
                raise self._bad(f"the line must be 'ngram {len(announced) + 1}=count' (got '{text}')")
            announced.append(int(count))
        if not announced:
            raise self._bad("\\data\\ announces no n-grams")
        return announced

    def _gram(self, fields: list[str], n: int, table: dict[Gram, float], backoffs: dict[Gram, float]) -> None:
        if len(fields) not in (n + 1, n + 2):
            raise self._bad(
                f"a line must have a probability, {n} words and optionally a back-off weight (got {len(fields)} fields)"
            )
        gram = tuple(fields[1 : n + 1])
        try:
            probability = float(fields[0])
            backoff = float(fields[n + 1]) if len(fields) == n + 2 else None
        except ValueError:
            raise self._bad(f"probability and back-off weight must be numbers (got '{' '.join(fields)}')") from None
        if (
            math.isnan(probability)
            or probability > 1e-4
            or (backoff is not None and (math.isnan(backoff) or backoff == math.inf))
        ):
            raise self._bad(f"probability and back-off weight must be log10 values (got '{' '.join(fields)}')")
        if gram in table:
            raise self._bad(f"'{' '.join(gram)}' occurs twice")
        table[gram] = min(probability, 0.0)
        if backoff is not None:
            backoffs[gram] = backoff

    def _bad(self, message: str, hint: str = "check the file, or estimate the model again") -> DataError:
        return DataError(message, where=f"{self.path}, line {self.line}", hint=hint)


def _open(path: str | Path, mode: str) -> IO[str]:
    if str(path).endswith(".gz"):
        return gzip.open(path, mode, encoding="utf-8")  # type: ignore[return-value]
    return open(path, mode, encoding="utf-8")
