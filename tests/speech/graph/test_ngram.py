"""N-gram models: probabilities that sum to one, the equations worked by hand, ARPA files of ours and of others."""

from __future__ import annotations

import gzip
import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundelay.errors import DataError, UsageError
from roundelay.speech.graph.ngram import BEGIN, END, UNKNOWN, estimate, one_of, read_arpa

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
def test_what_was_seen_is_at_least_as_likely_as_by_backing_off(text: list[list[str]], order: int) -> None:
    model = estimate(text, order, "abcd")
    for table in model.probabilities[1:]:
        for gram, log in table.items():
            backed_off = model.backoffs[gram[:-1]] + model.log10(gram[-1], gram[1:-1])
            assert log >= backed_off - 1e-9


def test_a_bigram_worked_by_hand() -> None:
    # Counts <s>a 2, ab 1, a</s> 1, b</s> 1, and no bigram twice but one: n1 = 3, n2 = 1, D = 3 / (3 + 2) = 0.6.
    model = estimate([["a", "b"], ["a"]], order=2)
    assert model.discounts[1] == pytest.approx((0.6, 0.6, 0.6))
    # Before a stands one word, before b one, before </s> two: n1 = 2, n2 = 1, D = 0.5; a quarter of three halves goes to 1/3.
    assert model.discounts[0] == pytest.approx((0.5, 0.5, 0.5))
    a, end = (0.5 + 1.5 / 3) / 4, (1.5 + 1.5 / 3) / 4
    assert 10 ** model.log10("a", ()) == pytest.approx(a)
    assert 10 ** model.log10(END, ()) == pytest.approx(end)
    assert 10 ** model.log10("a", (BEGIN,)) == pytest.approx((2 - 0.6) / 2 + 0.6 / 2 * a)
    assert 10 ** model.log10(END, ("a",)) == pytest.approx((1 - 0.6) / 2 + 2 * 0.6 / 2 * end)
    assert 10 ** model.log10("a", ("b",)) == pytest.approx(0.6 * a)


def test_three_discounts_where_counts_allow() -> None:
    # Unigrams seen once, twice, three and four times by 8, 4, 2 and 1 words; </s> far more often.
    kinds = {1: 8, 2: 4, 3: 2, 4: 1}
    words = [f"w{times}{n}" for times, count in kinds.items() for n in range(count) for _ in range(times)]
    model = estimate([[word] for word in words], order=1)
    share = 8 / (8 + 2 * 4)
    assert model.discounts == [pytest.approx((1 - 2 * share * 4 / 8, 2 - 3 * share * 2 / 4, 3 - 4 * share * 1 / 2))]


def test_a_vocabulary_without_text_is_uniform() -> None:
    model = estimate([], order=3, vocabulary=["a", "b", "c"])
    assert 10 ** model.log10("b", ("a", "c")) == pytest.approx(1 / 4)
    with pytest.raises(DataError, match="no word"):
        estimate([], order=2)


def test_one_of_some_words_and_nothing_else(tmp_path: Path) -> None:
    model = one_of(["yes", "no", "go", "go"])
    model.write_arpa(tmp_path / "one.arpa")
    for found in (model, read_arpa(tmp_path / "one.arpa")):
        assert [10 ** found.sentence_log10([word]) for word in ("go", "no", "yes")] == pytest.approx([1 / 3] * 3)
        assert found.sentence_log10([]) < -90 > found.sentence_log10(["go", "no"])
        assert found.perplexity([["go"], ["no"]]) == pytest.approx(math.sqrt(3))
    with pytest.raises(DataError, match="no word"):
        one_of([])


def test_more_of_the_past_predicts_a_text_with_memory_better() -> None:
    text = [("a b c d e " * 3 + "a c e b d " * 3).split() for _ in range(3)]
    values = [estimate(text, order).perplexity(text) for order in (1, 2, 3)]
    assert values[0] > values[1] > values[2]


def test_the_perplexity_of_a_uniform_model_is_its_size() -> None:
    model = estimate([], vocabulary=[f"w{n}" for n in range(9)])
    assert model.perplexity([["w1", "w2"], []]) == pytest.approx(10)


@pytest.mark.parametrize("order", [0, 5])
def test_orders_out_of_range_are_refused(order: int) -> None:
    with pytest.raises(UsageError, match="1 to 4"):
        estimate([["a"]], order)


def test_marks_inside_a_sentence_are_refused() -> None:
    with pytest.raises(DataError, match="sentence 2"):
        estimate([["a"], ["a", END]])


# ------------------------------------------------------------------------------------------- words not in the vocabulary


def test_words_outside_the_vocabulary_become_unknown_and_are_listed() -> None:
    model = estimate([["a", "x"], ["y", "a", "x"]], order=2, vocabulary=["a", "b"])
    assert model.outside == {"x": 2, "y": 1}
    assert model.vocabulary == {"a", "b", UNKNOWN, END}
    assert estimate([["a"]], vocabulary=["a", "b"]).vocabulary == {"a", "b", END}


def test_perplexity_counts_what_it_cannot_predict() -> None:
    closed = estimate([["a", "b"]] * 3, order=2)
    fit = closed.measure([["a", "q", "b"], ["q"]])
    assert (fit.outside, fit.predictions, fit.sentences) == ({"q": 2}, 4, 2)
    assert math.isfinite(fit.perplexity)
    opened = estimate([["a", "b", "z"]], order=2, vocabulary=["a", "b"])
    assert opened.measure([["a", "q", "b"]]).predictions == 4


# ------------------------------------------------------------------------------------------------------------- ARPA


@settings(max_examples=30)
@given(sentences.filter(any), orders)
def test_a_model_written_down_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, text: list[list[str]], order: int
) -> None:
    folder, model = tmp_path_factory.mktemp("arpa"), estimate(text, order)
    for name in ("lm.arpa", "lm.arpa.gz"):
        model.write_arpa(folder / name)
        found = read_arpa(folder / name)
        assert (found.order, found.probabilities, found.backoffs) == (order, model.probabilities, model.backoffs)


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
what follows is nobody's business
"""


def test_a_foreign_file_is_read_with_its_blanks_and_gaps(tmp_path: Path) -> None:
    (tmp_path / "lm").write_text(FOREIGN)
    model = read_arpa(tmp_path / "lm")
    assert model.log10("UNE", [BEGIN]) == -0.1
    assert model.log10("DEUX", [BEGIN]) == pytest.approx(-0.30103 - 0.7)
    assert model.log10(END, ["UNE", "DEUX"]) == -0.5
    assert model.log10("TROIS", []) == -math.inf
    assert model.sentence_log10(["UNE", "DEUX"]) == pytest.approx(-0.1 - 0.4 - 0.5)


@pytest.mark.parametrize(
    ("old", "new", "told"),
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
def test_a_damaged_file_is_named_with_its_line(tmp_path: Path, old: str, new: str, told: str) -> None:
    (tmp_path / "lm").write_text(FOREIGN.replace(old, new))
    with pytest.raises(DataError, match=told) as error:
        read_arpa(tmp_path / "lm")
    assert str(tmp_path / "lm") in error.value.where


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "cut.gz").write_bytes(gzip.compress(FOREIGN.encode())[:60])
    (tmp_path / "plain.gz").write_text(FOREIGN)
    (tmp_path / "latin").write_bytes(FOREIGN.replace("UNE", "ÉTÉ").encode("latin-1"))
    for name in ("cut.gz", "plain.gz", "latin", "absent"):
        with pytest.raises(DataError, match=name):
            read_arpa(tmp_path / name)
