"""N-gram models: normalization, equations worked by hand, ARPA files."""

from __future__ import annotations

import gzip
import itertools
import math
from pathlib import Path

import pytest
from decoding import sentence_log10
from hypothesis import given, settings
from hypothesis import strategies as st

from roundelay.errors import DataError, UsageError
from roundelay.speech.graph.ngram import BEGIN, END, UNKNOWN, estimate, read_arpa, single_word_ngram

sentences = st.lists(st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=6), max_size=30)
orders = st.integers(1, 4)

# ------------------------------------------------------------------------------------------------------ the estimate


@given(sentences, orders, st.sets(st.sampled_from(["a", "b", "c", "e"]), min_size=1))
def test_probabilities_sum_to_one_after_every_history(text: list[list[str]], order: int, vocabulary: set[str]) -> None:
    model = estimate(text, order, vocabulary)
    words = model.vocabulary
    assert words >= vocabulary | {END}
    histories = [(), (BEGIN,)]
    histories += [h for n in range(1, order) for h in itertools.product(sorted(words - {END}), repeat=n)][:150]
    for history in histories:
        chances = [10 ** model.log10(word, history) for word in words]
        assert all(chance > 0 for chance in chances)
        assert math.isclose(sum(chances), 1.0, rel_tol=1e-9)


@given(sentences, st.integers(2, 3))
def test_seen_ngrams_are_at_least_as_likely_as_by_back_off(text: list[list[str]], order: int) -> None:
    model = estimate(text, order, "abcd")
    for table in model.probabilities[1:]:
        for gram, log in table.items():
            backed_off = model.backoffs[gram[:-1]] + model.log10(gram[-1], gram[1:-1])
            assert log >= backed_off - 1e-9


def test_bigram_equals_hand_calculation() -> None:
    # Counts <s>a 2, ab 1, a</s> 1, b</s> 1: n1 = 3, n2 = 1, D = 3 / (3 + 2) = 0.6.
    model = estimate([["a", "b"], ["a"]], order=2)
    assert model.discounts[1] == pytest.approx((0.6, 0.6, 0.6))
    # One word precedes a, one b, two </s>: n1 = 2, n2 = 1, D = 0.5; a quarter of three halves is shared by 1/3.
    assert model.discounts[0] == pytest.approx((0.5, 0.5, 0.5))
    a, end = (0.5 + 1.5 / 3) / 4, (1.5 + 1.5 / 3) / 4
    assert 10 ** model.log10("a", ()) == pytest.approx(a)
    assert 10 ** model.log10(END, ()) == pytest.approx(end)
    assert 10 ** model.log10("a", (BEGIN,)) == pytest.approx((2 - 0.6) / 2 + 0.6 / 2 * a)
    assert 10 ** model.log10(END, ("a",)) == pytest.approx((1 - 0.6) / 2 + 2 * 0.6 / 2 * end)
    assert 10 ** model.log10("a", ("b",)) == pytest.approx(0.6 * a)


def test_three_discounts_if_counts_allow() -> None:
    # 8, 4, 2 and 1 unigrams occur once, twice, three and four times; </s> occurs far more often.
    kinds = {1: 8, 2: 4, 3: 2, 4: 1}
    words = [f"w{times}{n}" for times, count in kinds.items() for n in range(count) for _ in range(times)]
    model = estimate([[word] for word in words], order=1)
    share = 8 / (8 + 2 * 4)
    assert model.discounts == [pytest.approx((1 - 2 * share * 4 / 8, 2 - 3 * share * 2 / 4, 3 - 4 * share * 1 / 2))]


def test_vocabulary_without_text_gives_a_uniform_model() -> None:
    model = estimate([], order=3, vocabulary=["a", "b", "c"])
    assert 10 ** model.log10("b", ("a", "c")) == pytest.approx(1 / 4)
    with pytest.raises(DataError, match="no word"):
        estimate([], order=2)


def test_single_word_model_accepts_exactly_one_word(tmp_path: Path) -> None:
    model = single_word_ngram(["yes", "no", "go", "go"])
    model.write_arpa(tmp_path / "one.arpa")
    for ngram in (model, read_arpa(tmp_path / "one.arpa")):
        assert [10 ** sentence_log10(ngram, [word]) for word in ("go", "no", "yes")] == pytest.approx([1 / 3] * 3)
        assert sentence_log10(ngram, []) < -90 > sentence_log10(ngram, ["go", "no"])
        assert ngram.perplexity([["go"], ["no"]]) == pytest.approx(math.sqrt(3))
    with pytest.raises(DataError, match="no word"):
        single_word_ngram([])


def test_higher_orders_predict_a_text_with_memory_better() -> None:
    text = [("a b c d e " * 3 + "a c e b d " * 3).split() for _ in range(3)]
    values = [estimate(text, order).perplexity(text) for order in (1, 2, 3)]
    assert values[0] > values[1] > values[2]


def test_perplexity_of_a_uniform_model_is_its_size() -> None:
    model = estimate([], vocabulary=[f"w{n}" for n in range(9)])
    assert model.perplexity([["w1", "w2"], []]) == pytest.approx(10)


@pytest.mark.parametrize("order", [0, 5])
def test_orders_out_of_range_raise(order: int) -> None:
    with pytest.raises(UsageError, match="1 to 4"):
        estimate([["a"]], order)


def test_sentence_markers_in_the_text_raise() -> None:
    with pytest.raises(DataError, match="sentence 2"):
        estimate([["a"], ["a", END]])


# ------------------------------------------------------------------------------------------- out-of-vocabulary words


def test_oov_words_become_unk_and_are_counted() -> None:
    model = estimate([["a", "x"], ["y", "a", "x"]], order=2, vocabulary=["a", "b"])
    assert model.oov == {"x": 2, "y": 1}
    assert model.vocabulary == {"a", "b", UNKNOWN, END}
    assert estimate([["a"]], vocabulary=["a", "b"]).vocabulary == {"a", "b", END}


def test_measure_counts_words_that_it_cannot_predict() -> None:
    closed = estimate([["a", "b"]] * 3, order=2)
    fit = closed.measure([["a", "q", "b"], ["q"]])
    assert (fit.oov, fit.predictions, fit.sentences) == ({"q": 2}, 4, 2)
    assert math.isfinite(fit.perplexity)
    opened = estimate([["a", "b", "z"]], order=2, vocabulary=["a", "b"])
    assert opened.measure([["a", "q", "b"]]).predictions == 4


# ------------------------------------------------------------------------------------------------------------- ARPA


@settings(max_examples=30)
@given(sentences.filter(any), orders)
def test_model_survives_writing_and_reading(
    tmp_path_factory: pytest.TempPathFactory, text: list[list[str]], order: int
) -> None:
    folder, model = tmp_path_factory.mktemp("arpa"), estimate(text, order)
    for name in ("lm.arpa", "lm.arpa.gz"):
        model.write_arpa(folder / name)
        ngram = read_arpa(folder / name)
        assert (ngram.order, ngram.probabilities, ngram.backoffs) == (order, model.probabilities, model.backoffs)


FOREIGN = """
This file was made by something else.

\\data\\
ngram  1 = 4
ngram 2=2

\\1-grams:
-1.0 <s> -0.30103
-0.5\t</s>
-0.5   UNE\t-0.2
-0.7 DEUX
\\2-grams:
-0.1 <s> UNE
-0.4\tUNE DEUX

\\end\\
text after the end is ignored
"""


def test_foreign_file_with_blanks_and_gaps_is_read(tmp_path: Path) -> None:
    (tmp_path / "lm").write_text(FOREIGN)
    model = read_arpa(tmp_path / "lm")
    assert model.log10("UNE", [BEGIN]) == -0.1
    assert model.log10("DEUX", [BEGIN]) == pytest.approx(-0.30103 - 0.7)
    assert model.log10(END, ["UNE", "DEUX"]) == -0.5
    assert model.log10("TROIS", []) == -math.inf
    assert sentence_log10(model, ["UNE", "DEUX"]) == pytest.approx(-0.1 - 0.4 - 0.5)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("\\data\\", "data", "not an ARPA file"),
        ("ngram 2=2", "ngram 2=3", "announces 3"),
        ("ngram 2=2", "ngram 3=2", "line 6"),
        ("-0.4\tUNE DEUX", "-0.4\tUNE", "line 15"),
        ("-0.4\tUNE DEUX", "0.4\tUNE DEUX", "line 15"),
        ("-0.4\tUNE DEUX", "oh\tUNE DEUX", "line 15"),
        ("-0.7 DEUX", "-0.7 UNE", "twice"),
        ("\\2-grams:", "\\3-grams:", "does not announce"),
        ("\\end\\", "", "line 18"),
    ],
)
def test_error_names_the_line_of_a_damaged_file(tmp_path: Path, old: str, new: str, message: str) -> None:
    (tmp_path / "lm").write_text(FOREIGN.replace(old, new))
    with pytest.raises(DataError, match=message) as error:
        read_arpa(tmp_path / "lm")
    assert str(tmp_path / "lm") in error.value.where


def test_errors_name_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "cut.gz").write_bytes(gzip.compress(FOREIGN.encode())[:60])
    (tmp_path / "plain.gz").write_text(FOREIGN)
    (tmp_path / "latin").write_bytes(FOREIGN.replace("UNE", "ÉTÉ").encode("latin-1"))
    for name in ("cut.gz", "plain.gz", "latin", "absent"):
        with pytest.raises(DataError, match=name):
            read_arpa(tmp_path / name)
