"""The decoding graph: what it accepts, what it costs, what it is made of, and that it knows where it belongs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import kaldifst
import kaldilm
import numpy as np
import pytest
from decoding import Pronounced, TiedModel, graph_log10, random_task
from hypothesis import given, settings
from hypothesis import strategies as st

from roundelay.errors import DataError, UsageError
from roundelay.speech.graph.fst import ARC, Arrays, arrays_of, fst_of, read_fst, write_arrays
from roundelay.speech.graph.hclg import (
    build_graph,
    lexicon_fingerprint,
    load_graph,
    model_fingerprint,
    own_graph,
)
from roundelay.speech.graph.ngram import Ngram, estimate, one_of
from roundelay.speech.graph.transducers import Symbols, grammar_fst

ENTRIES = {
    "ONE": [(("W", "AH", "N"), 1.0)],
    "WON": [(("W", "AH", "N"), 0.5)],
    "TWO": [(("T", "UW"), 1.0)],
    "TOO": [(("T",), 1.0)],
}
TEXT = [["ONE", "TWO"], ["WON", "TOO", "TOO"], ["TWO"], ["ONE"]]


def monophones(pdfs: int = 12, loop: float = 0.6) -> TiedModel:
    phones = ["SIL", "AH", "N", "T", "UW", "W"]
    return TiedModel(phones, pdfs, 1, np.full(pdfs, loop), lambda left, phone, right, state: (2 * phone + state) % pdfs, 2, 2)


def built(folder: Path, model: TiedModel | None = None, text: list[list[str]] | None = None) -> Arrays:
    graph = build_graph(model or monophones(), Pronounced(ENTRIES), estimate(text or TEXT), folder)
    return arrays_of(read_fst(graph.fst))


# ------------------------------------------------------------------------------------------------------ the grammar


def sentence_cost(grammar: Arrays, backoff: int, labels: list[int]) -> float:
    """The cheapest path of a sentence through a grammar whose back-off arcs read `backoff`."""
    grammar.arcs["reads"][grammar.arcs["reads"] == backoff] = 0
    line = kaldifst.make_linear_acceptor(labels)
    whole = fst_of(grammar)
    kaldifst.arcsort(whole, "ilabel")
    best = kaldifst.shortest_path(kaldifst.compose(line, whole))
    found, _, _, cost = kaldifst.get_linear_symbol_sequence(best)
    return float(cost.value) if found and labels else math.inf


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.sampled_from(sorted(ENTRIES)), max_size=5), min_size=1, max_size=12),
    st.integers(1, 4),
    st.lists(st.sampled_from(sorted(ENTRIES)), min_size=1, max_size=5),
)
def test_the_grammar_costs_what_the_model_says_and_what_kaldilm_makes_of_its_file(
    tmp_path_factory: pytest.TempPathFactory, text: list[list[str]], order: int, sentence: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("grammar")
    model = estimate(text, order, ENTRIES)
    symbols = Symbols(monophones().lexicon_phones, ENTRIES, model)
    labels = [symbols.words[word] for word in sentence]
    ours = sentence_cost(arrays_of(grammar_fst(model, symbols)), symbols.backoff_word, labels)
    assert ours == pytest.approx(-graph_log10(model, sentence) * math.log(10), abs=1e-3)
    if order <= 2:
        assert ours == pytest.approx(-model.sentence_log10(sentence) * math.log(10), abs=1e-3)
    model.write_arpa(folder / "lm.arpa")
    (folder / "words.txt").write_text(symbols.table())
    kaldilm.arpa2fst(
        str(folder / "lm.arpa"), str(folder / "G.fst"), disambig_symbol="#0", read_symbol_table=str(folder / "words.txt")
    )
    assert sentence_cost(arrays_of(read_fst(folder / "G.fst")), symbols.backoff_word, labels) == pytest.approx(ours, abs=1e-3)


def test_a_grammar_of_one_word_accepts_each_word_once_and_nothing_else() -> None:
    model = one_of(ENTRIES)
    symbols = Symbols(monophones().lexicon_phones, ENTRIES, model)
    grammar = arrays_of(grammar_fst(model, symbols))
    assert symbols.backoff_word not in grammar.arcs["reads"]
    cost = {words: sentence_cost(grammar, symbols.backoff_word, [symbols.words[w] for w in words]) for words in
            [("ONE",), ("TWO",), ("ONE", "TWO")]}  # fmt: skip
    assert cost["ONE",] == pytest.approx(math.log(4), abs=1e-5) == cost["TWO",]
    assert cost["ONE", "TWO"] == math.inf
    assert not np.isfinite(grammar.final[0]), "silence is no word"


def test_words_that_cannot_be_pronounced_are_left_out_and_listed(tmp_path: Path) -> None:
    model = estimate([*TEXT, ["ONE", "HUNDRED", "TWO"]], order=3)
    graph = build_graph(monophones(), Pronounced(ENTRIES), model, tmp_path)
    assert graph.record["without_pronunciation"] == ["HUNDRED"]
    assert "HUNDRED" not in graph.words.read_text()
    with pytest.raises(DataError, match="same case"):
        build_graph(monophones(), Pronounced(ENTRIES), estimate([["one", "two"]]), tmp_path)


# ------------------------------------------------------------------------------------------------------- the graph


def test_every_state_can_be_held_and_only_by_the_pdf_just_entered(tmp_path: Path) -> None:
    graph = built(tmp_path)
    loops = graph.arcs["target"] == graph.source
    entering = {}
    for source, arc in zip(graph.source, graph.arcs, strict=True):
        if source != arc["target"]:
            entering.setdefault(int(arc["target"]), set()).add(int(arc["reads"]))
    held = {int(source): int(arc["reads"]) for source, arc in zip(graph.source[loops], graph.arcs[loops], strict=True)}
    assert len(held) == loops.sum()
    for state, labels in entering.items():
        assert labels == {held[state]} if state in held else labels == {0}
    assert graph.start not in held


def test_costs_of_entering_and_holding_are_those_of_the_self_loop(tmp_path: Path) -> None:
    before, after = built(tmp_path / "a", monophones(loop=0.6)), built(tmp_path / "b", monophones(loop=0.9))
    loops = before.arcs["target"] == before.source
    emitting = (before.arcs["reads"] > 0) & ~loops
    assert np.allclose(before.arcs["cost"][loops], -math.log(0.6))
    assert np.allclose(after.arcs["cost"][loops], -math.log(0.9))
    assert np.allclose((after.arcs["cost"] - before.arcs["cost"])[emitting], math.log(0.4 / 0.1), atol=1e-5)


def test_a_state_that_is_never_held_has_no_loop(tmp_path: Path) -> None:
    graph = built(tmp_path, monophones(loop=0.0))
    assert not (graph.arcs["target"] == graph.source).any()
    assert np.isfinite(graph.arcs["cost"]).all()


def test_one_pdf_for_all_states_keeps_words_and_durations_apart(tmp_path: Path) -> None:
    graph = build_graph(monophones(pdfs=1), Pronounced(ENTRIES), estimate(TEXT), tmp_path)
    found = arrays_of(read_fst(graph.fst))
    assert set(found.arcs["reads"]) == {0, 1}
    assert set(found.arcs["writes"]) == {0, 1, 2, 3, 4}


def test_a_file_and_the_model_itself_give_the_same_graph(tmp_path: Path) -> None:
    model = estimate(TEXT, 3)
    model.write_arpa(tmp_path / "lm.arpa")
    one = build_graph(monophones(), Pronounced(ENTRIES), model, tmp_path / "one")
    other = build_graph(monophones(), Pronounced(ENTRIES), tmp_path / "lm.arpa", tmp_path / "other")
    assert one.record == other.record


@pytest.mark.parametrize("context", [1, 3])
def test_a_small_recipe_has_a_small_graph(tmp_path: Path, context: int) -> None:
    model, entries, text = random_task(words=300, leaves=500, seed=0, context=context)
    graph = build_graph(model, Pronounced(entries), estimate(text, 2, entries), tmp_path)
    assert graph.record["words"] == 300
    assert graph.record["arcs"] < 60_000
    assert load_graph(tmp_path, lexicon=Pronounced(entries), model=model).record == graph.record


# --------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"ONE": [(("W", "AX"), 1.0)]}, "phone 'AX' of the word 'ONE'"),
        ({"ONE": [((), 1.0)]}, "'ONE' has an empty pronunciation"),
        ({"ONE": [(("W",), 0.0)]}, "pronunciation of 'ONE' has probability 0"),
    ],
)
def test_bad_pronunciations_are_named(tmp_path: Path, entries: dict, told: str) -> None:
    with pytest.raises(DataError, match=told):
        build_graph(monophones(), Pronounced(entries), estimate(TEXT), tmp_path)


def test_bad_models_are_named(tmp_path: Path) -> None:
    for loop in (1.0, -0.1, math.nan):
        with pytest.raises(DataError, match="self-loop probability of pdf 0"):
            built(tmp_path, monophones(loop=loop))
    model = monophones()
    model.tying = lambda left, phone, right, state: 99
    with pytest.raises(DataError, match="pdf 99 of 12 for state 0"):
        built(tmp_path, model)
    with pytest.raises(UsageError, match="silence"):
        build_graph(monophones(), Pronounced(ENTRIES), estimate(TEXT), tmp_path, silence_probability=1.0)


def test_a_language_model_that_never_ends_a_sentence_is_refused(tmp_path: Path) -> None:
    endless = Ngram(1, [{("ONE",): -0.3, ("<s>",): -99.0}], {})
    with pytest.raises(DataError, match="no sentence"):
        build_graph(monophones(), Pronounced(ENTRIES), endless, tmp_path)


def test_another_lexicon_and_another_model_are_found_out(tmp_path: Path) -> None:
    built(tmp_path)
    load_graph(tmp_path, lexicon=Pronounced(dict(reversed(ENTRIES.items()))), model=monophones())
    more = {**ENTRIES, "THREE": [(("T", "UW", "N"), 1.0)]}
    with pytest.raises(DataError, match="another lexicon"):
        load_graph(tmp_path, lexicon=Pronounced(more))
    with pytest.raises(DataError, match="another acoustic model"):
        load_graph(tmp_path, model=monophones(loop=0.7))


def test_fingerprints_see_pronunciations_probabilities_tying_and_self_loops() -> None:
    lexicons = [ENTRIES, {**ENTRIES, "TWO": [(("T", "UW", "UW"), 1.0)]}, {**ENTRIES, "TWO": [(("T", "UW"), 0.9)]}]
    assert len({lexicon_fingerprint(Pronounced(entries)) for entries in lexicons}) == 3
    tied = monophones()
    tied.tying = lambda left, phone, right, state: 0
    assert len({model_fingerprint(model) for model in (monophones(), monophones(loop=0.7), tied)}) == 3


def test_unfinished_and_damaged_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no finished decoding graph"):
        load_graph(tmp_path)
    built(tmp_path)
    record = json.loads((tmp_path / "graph.json").read_text())
    for damaged, told in (("{", "damaged"), ("{}", "damaged"), (json.dumps({**record, "format": 2}), "later version")):
        (tmp_path / "graph.json").write_text(damaged)
        with pytest.raises(DataError, match=told):
            load_graph(tmp_path)
    (tmp_path / "graph.json").write_text(json.dumps(record))
    with (tmp_path / "HCLG.fst").open("ab") as out:
        out.write(b"x")
    with pytest.raises(DataError, match="not the one the record speaks of"):
        load_graph(tmp_path)


# ---------------------------------------------------------------------------------------------------- files of arcs


def test_arrays_and_the_library_read_each_other(tmp_path: Path) -> None:
    arcs = np.array([(1, 2, 0.5, 1), (0, 0, 0.25, 2), (3, 0, 1.5, 2)], ARC)
    made = Arrays(0, np.array([np.inf, np.inf, 0.75], np.float32), np.array([0, 0, 1]), arcs)
    write_arrays(tmp_path / "a.fst", made)
    vector = kaldifst.StdVectorFst(read_fst(tmp_path / "a.fst"))
    vector.write(str(tmp_path / "b.fst"))
    for fst in (read_fst(tmp_path / "a.fst"), read_fst(tmp_path / "b.fst"), fst_of(made)):
        found = arrays_of(fst)
        assert (found.start, found.states) == (0, 3)
        assert np.array_equal(found.arcs, arcs)
        assert np.array_equal(found.source, made.source)
        assert np.array_equal(found.final, made.final)
    assert read_fst(tmp_path / "a.fst").num_input_epsilons(0) == 1


def test_files_that_are_no_graphs_are_refused(tmp_path: Path) -> None:
    built(tmp_path)
    whole = (tmp_path / "HCLG.fst").read_bytes()
    contents = {"cut off": whole[:200], "not a transducer": b"hello" * 20, "type": whole.replace(b"const", b"abcde")}
    contents |= {"graph is cut": whole[:20], "empty": whole[:44] + b"\xff" * 8 + whole[52:]}
    for told, content in contents.items():
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(DataError, match=told):
            read_fst(tmp_path / "file")
    with pytest.raises(DataError, match="cannot be read"):
        read_fst(tmp_path / "absent")


def test_transition_tables_must_fit(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="negative"):
        own_graph(tmp_path, tmp_path, transitions=np.array([-1, 0, -1]))
    with pytest.raises(DataError, match="name 8 pdfs, the scores have 7"):
        own_graph(tmp_path, tmp_path, transitions=np.array([-1, 0, 7]), num_pdfs=7)
