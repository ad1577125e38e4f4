"""The decoding graph: accepted sentences, weights, structure, fingerprints, files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import kaldifst
import kaldilm
import numpy as np
import pytest
from decoding import Pronounced, TiedModel, graph_log10, random_task, sentence_log10
from hypothesis import given, settings
from hypothesis import strategies as st

from roundelay.errors import DataError, UsageError
from roundelay.speech.graph.fst import ARC, FstArrays, arrays_to_fst, fst_to_arrays, read_fst, write_const_fst
from roundelay.speech.graph.hclg import (
    build_graph,
    external_graph,
    lexicon_fingerprint,
    load_graph,
    model_fingerprint,
)
from roundelay.speech.graph.ngram import Ngram, estimate, single_word_ngram
from roundelay.speech.graph.transducers import SymbolTables, grammar_fst

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


def built(folder: Path, model: TiedModel | None = None, text: list[list[str]] | None = None) -> FstArrays:
    graph = build_graph(model or monophones(), Pronounced(ENTRIES), estimate(text or TEXT), folder)
    return fst_to_arrays(read_fst(graph.fst))


# ------------------------------------------------------------------------------------------------------ the grammar


def sentence_cost(grammar: FstArrays, backoff: int, labels: list[int]) -> float:
    """Return the cost of the best path of a sentence through a grammar whose back-off arcs have the input label `backoff`."""
    grammar.arcs["ilabel"][grammar.arcs["ilabel"] == backoff] = 0
    line = kaldifst.make_linear_acceptor(labels)
    whole = arrays_to_fst(grammar)
    kaldifst.arcsort(whole, "ilabel")
    best = kaldifst.shortest_path(kaldifst.compose(line, whole))
    arrays, _, _, cost = kaldifst.get_linear_symbol_sequence(best)
    return float(cost.value) if arrays and labels else math.inf


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.sampled_from(sorted(ENTRIES)), max_size=5), min_size=1, max_size=12),
    st.integers(1, 4),
    st.lists(st.sampled_from(sorted(ENTRIES)), min_size=1, max_size=5),
)
def test_grammar_weights_equal_those_of_the_model_and_of_kaldilm(
    tmp_path_factory: pytest.TempPathFactory, text: list[list[str]], order: int, sentence: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("grammar")
    model = estimate(text, order, ENTRIES)
    symbols = SymbolTables(monophones().lexicon_phones, ENTRIES, model)
    labels = [symbols.words[word] for word in sentence]
    ours = sentence_cost(fst_to_arrays(grammar_fst(model, symbols)), symbols.backoff_word, labels)
    assert ours == pytest.approx(-graph_log10(model, sentence) * math.log(10), abs=1e-3)
    if order <= 2:
        assert ours == pytest.approx(-sentence_log10(model, sentence) * math.log(10), abs=1e-3)
    model.write_arpa(folder / "lm.arpa")
    (folder / "words.txt").write_text(symbols.table())
    kaldilm.arpa2fst(
        str(folder / "lm.arpa"), str(folder / "G.fst"), disambig_symbol="#0", read_symbol_table=str(folder / "words.txt")
    )
    assert sentence_cost(fst_to_arrays(read_fst(folder / "G.fst")), symbols.backoff_word, labels) == pytest.approx(
        ours, abs=1e-3
    )


def test_single_word_grammar_accepts_each_word_once() -> None:
    model = single_word_ngram(ENTRIES)
    symbols = SymbolTables(monophones().lexicon_phones, ENTRIES, model)
    grammar = fst_to_arrays(grammar_fst(model, symbols))
    assert symbols.backoff_word not in grammar.arcs["ilabel"]
    cost = {words: sentence_cost(grammar, symbols.backoff_word, [symbols.words[w] for w in words]) for words in
            [("ONE",), ("TWO",), ("ONE", "TWO")]}  # fmt: skip
    assert cost["ONE",] == pytest.approx(math.log(4), abs=1e-5) == cost["TWO",]
    assert cost["ONE", "TWO"] == math.inf
    assert not np.isfinite(grammar.final[0]), "the empty sentence is not accepted"


def test_words_without_pronunciation_are_left_out_and_listed(tmp_path: Path) -> None:
    model = estimate([*TEXT, ["ONE", "HUNDRED", "TWO"]], order=3)
    graph = build_graph(monophones(), Pronounced(ENTRIES), model, tmp_path)
    assert graph.metadata["without_pronunciation"] == ["HUNDRED"]
    assert "HUNDRED" not in graph.words.read_text()
    with pytest.raises(DataError, match="same case"):
        build_graph(monophones(), Pronounced(ENTRIES), estimate([["one", "two"]]), tmp_path)


# ------------------------------------------------------------------------------------------------------- the graph


def test_each_state_has_the_self_loop_of_the_pdf_just_entered(tmp_path: Path) -> None:
    graph = built(tmp_path)
    loops = graph.arcs["nextstate"] == graph.source
    entering = {}
    for source, arc in zip(graph.source, graph.arcs, strict=True):
        if source != arc["nextstate"]:
            entering.setdefault(int(arc["nextstate"]), set()).add(int(arc["ilabel"]))
    held = {int(source): int(arc["ilabel"]) for source, arc in zip(graph.source[loops], graph.arcs[loops], strict=True)}
    assert len(held) == loops.sum()
    for state, labels in entering.items():
        assert labels == {held[state]} if state in held else labels == {0}
    assert graph.start not in held


def test_weights_of_entering_and_staying_follow_the_self_loop(tmp_path: Path) -> None:
    before, after = built(tmp_path / "a", monophones(loop=0.6)), built(tmp_path / "b", monophones(loop=0.9))
    loops = before.arcs["nextstate"] == before.source
    emitting = (before.arcs["ilabel"] > 0) & ~loops
    assert np.allclose(before.arcs["weight"][loops], -math.log(0.6))
    assert np.allclose(after.arcs["weight"][loops], -math.log(0.9))
    assert np.allclose((after.arcs["weight"] - before.arcs["weight"])[emitting], math.log(0.4 / 0.1), atol=1e-5)


def test_zero_self_loop_probability_adds_no_loop(tmp_path: Path) -> None:
    graph = built(tmp_path, monophones(loop=0.0))
    assert not (graph.arcs["nextstate"] == graph.source).any()
    assert np.isfinite(graph.arcs["weight"]).all()


def test_one_pdf_for_all_states_keeps_words_distinct(tmp_path: Path) -> None:
    graph = build_graph(monophones(pdfs=1), Pronounced(ENTRIES), estimate(TEXT), tmp_path)
    arrays = fst_to_arrays(read_fst(graph.fst))
    assert set(arrays.arcs["ilabel"]) == {0, 1}
    assert set(arrays.arcs["olabel"]) == {0, 1, 2, 3, 4}


def test_arpa_file_and_model_give_the_same_graph(tmp_path: Path) -> None:
    model = estimate(TEXT, 3)
    model.write_arpa(tmp_path / "lm.arpa")
    one = build_graph(monophones(), Pronounced(ENTRIES), model, tmp_path / "one")
    other = build_graph(monophones(), Pronounced(ENTRIES), tmp_path / "lm.arpa", tmp_path / "other")
    assert one.metadata == other.metadata


@pytest.mark.parametrize("context", [1, 3])
def test_small_task_has_a_small_graph(tmp_path: Path, context: int) -> None:
    model, entries, text = random_task(words=300, leaves=500, seed=0, context=context)
    graph = build_graph(model, Pronounced(entries), estimate(text, 2, entries), tmp_path)
    assert graph.metadata["words"] == 300
    assert graph.metadata["arcs"] < 60_000
    assert load_graph(tmp_path, lexicon=Pronounced(entries), model=model).metadata == graph.metadata


# --------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"ONE": [(("W", "AX"), 1.0)]}, "phone 'AX' of the word 'ONE'"),
        ({"ONE": [((), 1.0)]}, "'ONE' has an empty pronunciation"),
        ({"ONE": [(("W",), 0.0)]}, "pronunciation of 'ONE' must be above 0"),
    ],
)
def test_errors_name_invalid_pronunciations(tmp_path: Path, entries: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build_graph(monophones(), Pronounced(entries), estimate(TEXT), tmp_path)


def test_invalid_models_raise(tmp_path: Path) -> None:
    for loop in (1.0, -0.1, math.nan):
        with pytest.raises(DataError, match="self-loop probability of pdf 0"):
            built(tmp_path, monophones(loop=loop))
    model = monophones()
    model.tying = lambda left, phone, right, state: 99
    with pytest.raises(DataError, match=r"pdf of state 0 of .* must be >= 0 and < 12 \(got 99\)"):
        built(tmp_path, model)
    with pytest.raises(UsageError, match="silence"):
        build_graph(monophones(), Pronounced(ENTRIES), estimate(TEXT), tmp_path, silence_probability=1.0)


def test_language_model_without_sentence_end_raises(tmp_path: Path) -> None:
    endless = Ngram(1, [{("ONE",): -0.3, ("<s>",): -99.0}], {})
    with pytest.raises(DataError, match="no sentence"):
        build_graph(monophones(), Pronounced(ENTRIES), endless, tmp_path)


def test_loading_detects_another_lexicon_or_model(tmp_path: Path) -> None:
    built(tmp_path)
    load_graph(tmp_path, lexicon=Pronounced(dict(reversed(ENTRIES.items()))), model=monophones())
    more = {**ENTRIES, "THREE": [(("T", "UW", "N"), 1.0)]}
    with pytest.raises(DataError, match="another lexicon"):
        load_graph(tmp_path, lexicon=Pronounced(more))
    with pytest.raises(DataError, match="another acoustic model"):
        load_graph(tmp_path, model=monophones(loop=0.7))


def test_fingerprints_cover_pronunciations_tying_and_self_loops() -> None:
    lexicons = [ENTRIES, {**ENTRIES, "TWO": [(("T", "UW", "UW"), 1.0)]}, {**ENTRIES, "TWO": [(("T", "UW"), 0.9)]}]
    assert len({lexicon_fingerprint(Pronounced(entries)) for entries in lexicons}) == 3
    tied = monophones()
    tied.tying = lambda left, phone, right, state: 0
    assert len({model_fingerprint(model) for model in (monophones(), monophones(loop=0.7), tied)}) == 3


def test_incomplete_and_damaged_folders_raise(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no finished decoding graph"):
        load_graph(tmp_path)
    built(tmp_path)
    metadata = json.loads((tmp_path / "graph.json").read_text())
    for damaged, message in (("{", "damaged"), ("{}", "damaged"), (json.dumps({**metadata, "format": 2}), "later version")):
        (tmp_path / "graph.json").write_text(damaged)
        with pytest.raises(DataError, match=message):
            load_graph(tmp_path)
    (tmp_path / "graph.json").write_text(json.dumps(metadata))
    with (tmp_path / "HCLG.fst").open("ab") as out:
        out.write(b"x")
    with pytest.raises(DataError, match=r"does not match graph\.json"):
        load_graph(tmp_path)


# ---------------------------------------------------------------------------------------------------- files of arcs


def test_arrays_and_kaldifst_exchange_files(tmp_path: Path) -> None:
    arcs = np.array([(1, 2, 0.5, 1), (0, 0, 0.25, 2), (3, 0, 1.5, 2)], ARC)
    original = FstArrays(0, np.array([np.inf, np.inf, 0.75], np.float32), np.array([0, 0, 1]), arcs)
    write_const_fst(tmp_path / "a.fst", original)
    vector = kaldifst.StdVectorFst(read_fst(tmp_path / "a.fst"))
    vector.write(str(tmp_path / "b.fst"))
    for fst in (read_fst(tmp_path / "a.fst"), read_fst(tmp_path / "b.fst"), arrays_to_fst(original)):
        arrays = fst_to_arrays(fst)
        assert (arrays.start, arrays.states) == (0, 3)
        assert np.array_equal(arrays.arcs, arcs)
        assert np.array_equal(arrays.source, original.source)
        assert np.array_equal(arrays.final, original.final)
    assert read_fst(tmp_path / "a.fst").num_input_epsilons(0) == 1


def test_reading_invalid_graph_files_raises(tmp_path: Path) -> None:
    built(tmp_path)
    whole = (tmp_path / "HCLG.fst").read_bytes()
    contents = {"truncated": whole[:200], "not an OpenFst file": b"hello" * 20, "of type": whole.replace(b"const", b"abcde")}
    contents |= {"file is truncated": whole[:20], "empty": whole[:44] + b"\xff" * 8 + whole[52:]}
    for message, content in contents.items():
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(DataError, match=message):
            read_fst(tmp_path / "file")
    with pytest.raises(DataError, match="cannot be read"):
        read_fst(tmp_path / "absent")


def test_transition_tables_must_fit_the_scores(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="negative"):
        external_graph(tmp_path, tmp_path, transitions=np.array([-1, 0, -1]))
    with pytest.raises(DataError, match="need 8 pdfs, the scores have 7"):
        external_graph(tmp_path, tmp_path, transitions=np.array([-1, 0, 7]), num_pdfs=7)
