"""Decoding: equality with exhaustive search, any number of processes, n-best lists, errors."""

from __future__ import annotations

import math
from pathlib import Path

import kaldifst
import numpy as np
import pytest
from decoding import Entries, Pronounced, TiedModel, clear_scores, exhaustive, random_task, sentence_log10
from hypothesis import given, settings
from hypothesis import strategies as st

from roundelay.errors import DataError, UsageError
from roundelay.speech import decode
from roundelay.speech.decode import DecodeOptions, Decoder, _middle_of_best, choose_scale, decode_all, nbest_all
from roundelay.speech.features.kaldi_ark import write_matrices
from roundelay.speech.graph.fst import fst_to_arrays, read_fst, write_const_fst
from roundelay.speech.graph.hclg import Graph, build_graph, external_graph, load_graph
from roundelay.speech.graph.ngram import estimate, single_word_ngram
from roundelay.speech.hmm.gmm import Gmm
from roundelay.speech.hmm.lexicon import Lexicon
from roundelay.speech.hmm.model import AlignmentModel
from roundelay.speech.score import score

EXACT = DecodeOptions(beam=1000.0, max_active=1_000_000, acoustic_scale=1.0)
# Homophones (y, z) and prefixes of other words: one phone sequence has two readings (v x and w).
ENTRIES: Entries = {
    "x": [(("A",), 1.0)],
    "y": [(("A", "B"), 0.7), (("B",), 0.3)],
    "z": [(("B",), 1.0)],
    "v": [(("K",), 1.0)],
    "w": [(("K", "A"), 1.0)],
}
TEXT = [["x", "y"], ["z", "w"], ["x", "z", "z"], ["y"], ["v", "x"]]
# Weights are rounded to 1/1024 twice when states are merged: half of that for each arc of a path of about 20 arcs.
ROUNDING = 0.02


def tied_at_random(context: int, pdfs: int, seed: int) -> TiedModel:
    """Return a model in which any state of any phone in any context may share its pdf with any other."""
    rng = np.random.default_rng(seed)
    table = rng.integers(0, pdfs, size=(4, 4, 4, 2))

    def tying(left: int, phone: int, right: int, state: int) -> int:
        return int(table[left, phone, right, state] if context == 3 else table[0, phone, 0, state])

    return TiedModel(["SIL", "A", "B", "K"], pdfs, context, rng.uniform(0.1, 0.9, pdfs), tying, 2, 1, rng.uniform(0.1, 0.9))


@settings(max_examples=60)
@given(st.sampled_from([1, 3]), st.integers(1, 3), st.integers(1, 8), st.integers(1, 7), st.integers(0, 10_000))
def test_best_sentence_equals_that_of_exhaustive_search(
    tmp_path_factory: pytest.TempPathFactory, context: int, order: int, pdfs: int, frames: int, seed: int
) -> None:
    model, language = tied_at_random(context, pdfs, seed), estimate(TEXT, order)
    graph = build_graph(model, Pronounced(ENTRIES), language, tmp_path_factory.mktemp("graph"))
    scores = np.random.default_rng(seed).normal(0.0, 3.0, size=(frames, pdfs)).astype(np.float32)
    listed = exhaustive(model, ENTRIES, language, scores, longest=frames // 2)
    hypothesis = Decoder(graph, EXACT).decode(scores)
    assert hypothesis.final
    assert hypothesis.score == pytest.approx(listed[0][0], abs=ROUNDING)
    assert {words: value for value, words in listed}[hypothesis.words] == pytest.approx(hypothesis.score, abs=ROUNDING)


@settings(max_examples=25)
@given(st.sampled_from([1, 3]), st.integers(1, 3), st.integers(4, 7), st.integers(0, 10_000))
def test_nbest_sentences_equal_those_of_exhaustive_search(
    tmp_path_factory: pytest.TempPathFactory, context: int, order: int, frames: int, seed: int
) -> None:
    model, language = tied_at_random(context, 7, seed), estimate(TEXT, order)
    graph = build_graph(model, Pronounced(ENTRIES), language, tmp_path_factory.mktemp("graph"))
    scores = np.random.default_rng(seed).normal(0.0, 2.0, size=(frames, 7)).astype(np.float32)
    listed = exhaustive(model, ENTRIES, language, scores, longest=frames // 2)
    nbest = Decoder(graph, EXACT).nbest(scores, 6, lattice_beam=1000.0)
    assert len(nbest) == min(6, len(listed))
    assert len({hypothesis.words for hypothesis in nbest}) == len(nbest)
    values = {words: value for value, words in listed}
    for hypothesis, (value, _) in zip(nbest, listed, strict=False):
        assert hypothesis.score == pytest.approx(value, abs=ROUNDING)
        assert values[hypothesis.words] == pytest.approx(hypothesis.score, abs=ROUNDING)
        assert hypothesis.graph_score + hypothesis.acoustic_score == pytest.approx(hypothesis.score, abs=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_aligner_and_decoder_score_the_same_words_equally(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 9, size=(4, 4, 4, 2)).astype(np.int32)
    table[:, 0] = table[:1, 0, :1]
    model = AlignmentModel(
        ["SIL", "A", "B", "K"],
        table,
        rng.uniform(0.1, 0.9, 9),
        Gmm.single(np.zeros((9, 1)), np.ones((9, 1))),
        states_per_phone=2,
        silence_states=1,
        silence_probability=0.3,
    )
    lexicon, language = Lexicon(ENTRIES), estimate(TEXT, 2)
    scores = rng.normal(0.0, 3.0, size=(60, 9)).astype(np.float32)
    build_graph(model, lexicon, language, tmp_path)
    load_graph(tmp_path, lexicon=lexicon, model=model)
    hypothesis = Decoder(tmp_path, EXACT).decode(scores)
    aligned = model.align_scores(scores, hypothesis.words, lexicon)
    language_score = sentence_log10(language, hypothesis.words) * math.log(10)
    assert len(hypothesis.words) > 3
    # Rounding as above, on a path of 60 frames.
    assert hypothesis.score == pytest.approx(len(scores) * aligned.score + language_score, abs=0.06)


# -------------------------------------------------------------------------------------- a task of the size of a recipe


Task = tuple[TiedModel, Entries, Graph, dict[str, list[str]], dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    model, entries, text = random_task(words=120, leaves=400, seed=3)
    graph = build_graph(model, Pronounced(entries), estimate(text, 2, entries), tmp_path_factory.mktemp("graph"))
    refs = {f"s{n % 4}-{n:02d}": sentence for n, sentence in enumerate(text[:12])}
    return model, entries, graph, refs, {name: clear_scores(model, entries, refs[name], n) for n, name in enumerate(refs)}


def test_clear_utterances_are_recognized(task: Task) -> None:
    _, _, graph, refs, scores = task
    decoded = decode_all(graph.fst.parent, scores.__getitem__, scores, DecodeOptions(acoustic_scale=0.5), progress="none")
    assert score(refs, decoded.words).wer < 5
    assert (decoded.unfinished, decoded.frames) == ([], sum(map(len, scores.values())))
    assert decoded.times_real_time > 0


def test_lattice_and_best_path_search_agree(task: Task) -> None:
    _, _, graph, _, scores = task
    decoder = Decoder(graph, DecodeOptions(acoustic_scale=0.3))
    for matrix in list(scores.values())[:3]:
        best, listed = decoder.decode(matrix), decoder.nbest(matrix, 5)
        assert listed[0].words == best.words
        assert listed[0].score == pytest.approx(best.score, abs=1e-2)
        assert listed[0].acoustic_score == pytest.approx(best.acoustic_score, abs=1e-2)
        assert listed[0].graph_score == pytest.approx(best.graph_score, abs=1e-2)
        assert [h.score for h in listed] == sorted((h.score for h in listed), reverse=True)


@pytest.mark.dist
def test_processes_and_script_files_give_equal_hypotheses(task: Task, tmp_path: Path) -> None:
    _, _, graph, _, scores = task
    write_matrices(tmp_path / "scores.ark", tmp_path / "scores.scp", scores.items())
    alone = decode_all(graph, scores.__getitem__, scores, progress="none")
    for source, jobs in ((scores.__getitem__, 2), (tmp_path / "scores.scp", 2), (str(tmp_path / "scores.scp"), 1)):
        decoded = decode_all(graph, source, scores, jobs=jobs, progress="none")
        assert dict(decoded) == dict(alone)
        assert list(decoded) == list(alone)


@pytest.mark.dist
def test_nbest_lists_do_not_depend_on_the_number_of_processes(task: Task) -> None:
    _, _, graph, _, scores = task
    few = dict(list(scores.items())[:4])
    options = DecodeOptions(acoustic_scale=0.3)
    one, two = (nbest_all(graph, few.__getitem__, few, 3, options, jobs=jobs, progress="none") for jobs in (1, 2))
    assert one == two
    decoder = Decoder(graph, options)
    assert one == {name: decoder.nbest(matrix, 3, name) for name, matrix in few.items()}
    with pytest.raises(UsageError, match="hypotheses must be >= 1"):
        nbest_all(graph, few.__getitem__, few, 0, progress="none")


@pytest.mark.dist
def test_scale_with_the_fewest_errors_is_chosen(task: Task) -> None:
    model, entries, graph, refs, _ = task
    faint = {name: clear_scores(model, entries, words, n, gap=5.0) for n, (name, words) in enumerate(refs.items())}
    grid = [0.001, 0.5, 0.25, 8.0]
    one, two = (choose_scale(graph, faint.__getitem__, refs, grid=grid, jobs=jobs, progress="none") for jobs in (1, 2))
    assert one == two
    assert list(one.scores) == sorted(grid)
    errors = {scale: result.errors.total for scale, result in one.scores.items()}
    assert errors[one.scale] == min(errors.values()) < errors[0.001]
    single = decode_all(graph, faint.__getitem__, faint, DecodeOptions(acoustic_scale=one.scale), progress="none")
    assert single.words == one.decoded[one.scale].words


@pytest.mark.parametrize(
    ("errors", "chosen"),
    [
        ([5, 4, 3, 4], 0.3),
        ([1, 1, 1, 2], 0.2),
        ([2, 1, 1, 2], 0.2),
        ([1, 1, 2, 2], 0.2),
        ([2, 2, 1, 1], 0.3),
        ([1, 2, 2, 1], 0.1),
    ],
)
def test_middle_one_of_equal_scales_is_chosen(errors: list[int], chosen: float) -> None:
    assert _middle_of_best(errors, [0.1, 0.2, 0.3, 0.4]) == chosen


def test_truncated_utterance_has_a_partial_path_and_is_counted(tmp_path: Path) -> None:
    entries: Entries = {"long": [(("A", "B", "A"), 1.0)]}
    model = tied_at_random(1, 5, seed=0)
    model.silence_states = 2
    endings = estimate([["long"]] * 50, 2)
    del endings.probabilities[0][("</s>",)]
    graph = build_graph(model, Pronounced(entries), endings, tmp_path)
    scores = {"short": np.zeros((4, 5), np.float32), "enough": np.zeros((9, 5), np.float32)}
    decoded = decode_all(graph, scores.__getitem__, scores, EXACT, progress="none")
    assert decoded.unfinished == ["short"]
    assert decoded["enough"].words == ("long",)
    assert np.isfinite(decoded["short"].score)


@pytest.mark.parametrize(("beam", "words"), [(1.0, ()), (3.0, ("A",)), (6.0, ("A",))])
def test_search_without_final_state_is_repeated_with_a_wider_beam(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beam: float, words: tuple[str, ...]
) -> None:
    # Silence fits all frames best, but a sentence is one word. Beam 6 keeps the word. Beam 3 keeps it in the second search,
    # which is three times as wide. Beam 1 never keeps it.
    monkeypatch.setattr(decode, "MIN_ACTIVE", 0)
    model = TiedModel(["SIL", "A"], 4, 1, np.full(4, 0.5), lambda left, phone, right, state: 2 * phone + state, 2, 2)
    graph = build_graph(model, Pronounced({"A": [(("A",), 1.0)]}), single_word_ngram(["A"]), tmp_path)
    scores = np.tile(np.array([0, 0, -2, -2], np.float32), (10, 1))
    hypothesis = Decoder(graph, DecodeOptions(beam=beam, acoustic_scale=1.0)).decode(scores)
    assert (hypothesis.words, hypothesis.final) == (words, bool(words))


# ------------------------------------------------------------------------------------------------------------- errors


def spoiled(matrix: np.ndarray, value: float) -> np.ndarray:
    copy = matrix.copy()
    copy[len(copy) // 2, 3] = value
    return copy


@pytest.mark.dist
@pytest.mark.parametrize("jobs", [1, 2])
def test_errors_of_invalid_scores_name_the_utterance(task: Task, jobs: int) -> None:
    _, _, graph, _, scores = task
    good = scores["s0-00"]
    bad = {
        "shape": good[:0],
        "1 pdfs do not fit a graph of": good[:, :1],
        "got NaN": spoiled(good, np.nan),
        "got inf": spoiled(good, np.inf),
    }
    for message, matrix in list(bad.items())[:: 1 if jobs == 1 else 3]:
        with pytest.raises(DataError, match=message) as error:
            decode_all(graph, {"u1": good, "u2": matrix}.__getitem__, ["u1", "u2"], jobs=jobs, progress="none")
        assert "utterance u2" in error.value.where
    for shape in ((0, graph.num_pdfs), (5,), (2, 3, 4)):
        with pytest.raises(DataError, match="shape"):
            Decoder(graph).decode(np.zeros(shape, np.float32))


def test_scores_of_minus_infinity_remove_paths(task: Task) -> None:
    _, _, graph, _, scores = task
    decoder, matrix = Decoder(graph), scores["s0-00"].copy()
    assert decoder.decode(spoiled(matrix, -np.inf)).words == decoder.decode(matrix).words
    matrix[10] = -np.inf
    nothing = decoder.decode(matrix)
    assert (nothing.words, nothing.final, nothing.score) == ((), False, -np.inf)
    assert decoder.nbest(matrix, 3) == [nothing]


def test_error_names_the_utterance_missing_in_a_script_file(task: Task, tmp_path: Path) -> None:
    _, _, graph, _, scores = task
    write_matrices(tmp_path / "scores.ark", tmp_path / "scores.scp", list(scores.items())[:2])
    with pytest.raises(DataError, match="no scores of utterance 'other'"):
        decode_all(graph, tmp_path / "scores.scp", [next(iter(scores)), "other"], progress="none")


@pytest.mark.parametrize("wrong", [{"beam": 0}, {"beam": float("nan")}, {"acoustic_scale": -1.0}, {"max_active": 1}])
def test_options_out_of_range_raise(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        DecodeOptions(**wrong)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------- graphs of other toolkits


def with_transition_ids(graph: Graph, folder: Path, kind: str) -> np.ndarray:
    """Write the graph with Kaldi's labels, three transition-ids for each pdf. Return the pdf of each transition-id."""
    assert graph.num_pdfs is not None
    rng = np.random.default_rng(0)
    pdfs = rng.permutation(np.repeat(np.arange(graph.num_pdfs), 3))
    ids = [np.flatnonzero(pdfs == pdf) + 1 for pdf in range(graph.num_pdfs)]
    arrays = fst_to_arrays(read_fst(graph.fst))
    arrays.arcs["ilabel"] = [rng.choice(ids[label - 1]) if label else 0 for label in arrays.arcs["ilabel"]]
    write_const_fst(folder / "HCLG.fst", arrays)
    if kind == "vector":
        kaldifst.StdVectorFst(read_fst(folder / "HCLG.fst")).write(str(folder / "HCLG.fst"))
    return np.concatenate([[-1], pdfs])


@pytest.mark.parametrize("kind", ["const", "vector"])
def test_graph_of_transition_ids_decodes_like_one_of_pdfs(task: Task, tmp_path: Path, kind: str) -> None:
    _, _, graph, _, scores = task
    transitions = with_transition_ids(graph, tmp_path, kind)
    theirs = external_graph(tmp_path / "HCLG.fst", graph.words, transitions=transitions)
    ours = decode_all(graph, scores.__getitem__, scores, progress="none")
    assert dict(decode_all(theirs, scores.__getitem__, scores, progress="none")) == dict(ours)
    plain = external_graph(graph.fst, graph.words, num_pdfs=graph.num_pdfs)
    assert dict(decode_all(plain, scores.__getitem__, scores, progress="none")) == dict(ours)


def test_graph_that_does_not_fit_raises_before_the_search(task: Task, tmp_path: Path) -> None:
    _, _, graph, _, scores = task
    transitions = with_transition_ids(graph, tmp_path, "const")
    fst, matrix = tmp_path / "HCLG.fst", scores["s0-00"]
    (tmp_path / "words.txt").write_text("<eps> 0\nonly 1\n")
    with pytest.raises(DataError, match="transition-id"):
        Decoder(external_graph(fst, graph.words, transitions=transitions[:-50]))
    with pytest.raises(DataError, match=r"final\.mdl"):
        Decoder(external_graph(fst, graph.words, num_pdfs=graph.num_pdfs))
    with pytest.raises(DataError, match="word symbol table"):
        Decoder(external_graph(fst, tmp_path / "words.txt", transitions=transitions))
    with pytest.raises(DataError, match="pdfs do not fit a graph of"):
        Decoder(external_graph(fst, graph.words, transitions=transitions)).decode(matrix[:, :-1], "u")
    for content in ("<eps>\n", "a b c\n", "word -3\n"):
        (tmp_path / "words.txt").write_text(content)
        with pytest.raises(DataError, match="line 1"):
            Decoder(external_graph(fst, tmp_path / "words.txt", transitions=transitions))
