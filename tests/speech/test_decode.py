"""Decoding: the best sentence is the best of all, however many processes look for it, and bad scores are named."""

from __future__ import annotations

import math
from pathlib import Path

import kaldifst
import numpy as np
import pytest
from decoding import Entries, Pronounced, TiedModel, clear_scores, exhaustive, random_task
from hypothesis import given, settings
from hypothesis import strategies as st

from roundelay.errors import DataError, UsageError
from roundelay.speech import decode
from roundelay.speech.decode import DecodeOptions, Decoder, _middle_of_best, choose_scale, decode_all
from roundelay.speech.features.kaldi_ark import write_matrices
from roundelay.speech.graph.fst import arrays_of, read_fst, write_arrays
from roundelay.speech.graph.hclg import Graph, build_graph, load_graph, own_graph
from roundelay.speech.graph.ngram import estimate, one_of
from roundelay.speech.hmm.gmm import Gmm
from roundelay.speech.hmm.model import AlignmentModel
from roundelay.speech.hmm.lexicon import Lexicon
from roundelay.speech.score import score

EXACT = DecodeOptions(beam=1000.0, max_active=1_000_000, acoustic_scale=1.0)
# Some sound alike (y, z), and some begin others, so that one string of phones has two readings (v x and w).
ENTRIES: Entries = {
    "x": [(("A",), 1.0)],
    "y": [(("A", "B"), 0.7), (("B",), 0.3)],
    "z": [(("B",), 1.0)],
    "v": [(("K",), 1.0)],
    "w": [(("K", "A"), 1.0)],
}
TEXT = [["x", "y"], ["z", "w"], ["x", "z", "z"], ["y"], ["v", "x"]]
# Costs are rounded to 1/1024 twice when states are merged: half of that for each arc of a path, of which there are some twenty.
ROUNDING = 0.02


def tied_at_random(context: int, pdfs: int, seed: int) -> TiedModel:
    """Any state of any phone in any context may share its pdf with any other."""
    dice = np.random.default_rng(seed)
    table = dice.integers(0, pdfs, size=(4, 4, 4, 2))

    def tying(left: int, phone: int, right: int, state: int) -> int:
        return int(table[left, phone, right, state] if context == 3 else table[0, phone, 0, state])

    return TiedModel(["SIL", "A", "B", "K"], pdfs, context, dice.uniform(0.1, 0.9, pdfs), tying, 2, 1, dice.uniform(0.1, 0.9))


@settings(max_examples=60)
@given(st.sampled_from([1, 3]), st.integers(1, 3), st.integers(1, 8), st.integers(1, 7), st.integers(0, 10_000))
def test_the_best_sentence_is_that_of_exhaustive_search(
    tmp_path_factory: pytest.TempPathFactory, context: int, order: int, pdfs: int, frames: int, seed: int
) -> None:
    model, language = tied_at_random(context, pdfs, seed), estimate(TEXT, order)
    graph = build_graph(model, Pronounced(ENTRIES), language, tmp_path_factory.mktemp("graph"))
    scores = np.random.default_rng(seed).normal(0.0, 3.0, size=(frames, pdfs)).astype(np.float32)
    listed = exhaustive(model, ENTRIES, language, scores, longest=frames // 2)
    found = Decoder(graph, EXACT).decode(scores)
    assert found.final
    assert found.score == pytest.approx(listed[0][0], abs=ROUNDING)
    assert {words: value for value, words in listed}[found.words] == pytest.approx(found.score, abs=ROUNDING)


@settings(max_examples=25)
@given(st.sampled_from([1, 3]), st.integers(1, 3), st.integers(4, 7), st.integers(0, 10_000))
def test_the_n_best_sentences_are_those_of_exhaustive_search(
    tmp_path_factory: pytest.TempPathFactory, context: int, order: int, frames: int, seed: int
) -> None:
    model, language = tied_at_random(context, 7, seed), estimate(TEXT, order)
    graph = build_graph(model, Pronounced(ENTRIES), language, tmp_path_factory.mktemp("graph"))
    scores = np.random.default_rng(seed).normal(0.0, 2.0, size=(frames, 7)).astype(np.float32)
    listed = exhaustive(model, ENTRIES, language, scores, longest=frames // 2)
    found = Decoder(graph, EXACT).nbest(scores, 6, lattice_beam=1000.0)
    assert len(found) == min(6, len(listed))
    assert len({hypothesis.words for hypothesis in found}) == len(found)
    values = {words: value for value, words in listed}
    for hypothesis, (value, _) in zip(found, listed, strict=False):
        assert hypothesis.score == pytest.approx(value, abs=ROUNDING)
        assert values[hypothesis.words] == pytest.approx(hypothesis.score, abs=ROUNDING)


@pytest.mark.parametrize("seed", range(5))
def test_the_aligner_gives_the_decoded_words_the_score_of_the_decoder(tmp_path: Path, seed: int) -> None:
    dice = np.random.default_rng(seed)
    table = dice.integers(0, 9, size=(4, 4, 4, 2)).astype(np.int32)
    table[:, 0] = table[:1, 0, :1]
    model = AlignmentModel(
        ["SIL", "A", "B", "K"],
        table,
        dice.uniform(0.1, 0.9, 9),
        Gmm.single(np.zeros((9, 1)), np.ones((9, 1))),
        states_per_phone=2,
        silence_states=1,
        silence_probability=0.3,
    )
    lexicon, language = Lexicon(ENTRIES), estimate(TEXT, 2)
    scores = dice.normal(0.0, 3.0, size=(60, 9)).astype(np.float32)
    build_graph(model, lexicon, language, tmp_path)
    load_graph(tmp_path, lexicon=lexicon, model=model)
    found = Decoder(tmp_path, EXACT).decode(scores)
    aligned = model.align_scores(scores, found.words, lexicon)
    language_score = language.sentence_log10(found.words) * math.log(10)
    assert len(found.words) > 3
    # Rounding as above, on a path of 60 frames.
    assert found.score == pytest.approx(len(scores) * aligned.score + language_score, abs=0.06)


# ---------------------------------------------------------------------------------------------- a recipe's size


Task = tuple[TiedModel, Entries, Graph, dict[str, list[str]], dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    model, entries, text = random_task(words=120, leaves=400, seed=3)
    graph = build_graph(model, Pronounced(entries), estimate(text, 2, entries), tmp_path_factory.mktemp("graph"))
    refs = {f"s{n % 4}-{n:02d}": sentence for n, sentence in enumerate(text[:12])}
    return model, entries, graph, refs, {name: clear_scores(model, entries, refs[name], n) for n, name in enumerate(refs)}


def test_what_was_said_clearly_is_understood(task: Task) -> None:
    _, _, graph, refs, scores = task
    decoded = decode_all(graph.fst.parent, scores.__getitem__, scores, DecodeOptions(acoustic_scale=0.5), progress="none")
    assert score(refs, decoded.words).wer < 5
    assert (decoded.unfinished, decoded.frames) == ([], sum(map(len, scores.values())))
    assert decoded.times_real_time > 0


def test_a_lattice_and_the_search_for_the_best_path_agree(task: Task) -> None:
    _, _, graph, _, scores = task
    decoder = Decoder(graph, DecodeOptions(acoustic_scale=0.3))
    for matrix in list(scores.values())[:3]:
        best, listed = decoder.decode(matrix), decoder.nbest(matrix, 5)
        assert listed[0].words == best.words
        assert listed[0].score == pytest.approx(best.score, abs=1e-2)
        assert [h.score for h in listed] == sorted((h.score for h in listed), reverse=True)


@pytest.mark.dist
def test_processes_and_lists_of_matrices_change_nothing(task: Task, tmp_path: Path) -> None:
    _, _, graph, _, scores = task
    write_matrices(tmp_path / "scores.ark", tmp_path / "scores.scp", scores.items())
    alone = decode_all(graph, scores.__getitem__, scores, progress="none")
    for source, jobs in ((scores.__getitem__, 2), (tmp_path / "scores.scp", 2), (str(tmp_path / "scores.scp"), 1)):
        found = decode_all(graph, source, scores, jobs=jobs, progress="none")
        assert dict(found) == dict(alone)
        assert list(found) == list(alone)


@pytest.mark.dist
def test_the_scale_with_the_fewest_errors_is_chosen_in_any_number_of_processes(task: Task) -> None:
    model, entries, graph, refs, _ = task
    faint = {name: clear_scores(model, entries, words, n, gap=5.0) for n, (name, words) in enumerate(refs.items())}
    grid = [0.001, 0.5, 0.25, 8.0]
    one, two = (choose_scale(graph, faint.__getitem__, refs, grid=grid, jobs=jobs, progress="none") for jobs in (1, 2))
    assert one == two
    assert list(one.scores) == sorted(grid)
    errors = {scale: found.errors.total for scale, found in one.scores.items()}
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
def test_of_equal_scales_the_middle_one_is_taken(errors: list[int], chosen: float) -> None:
    assert _middle_of_best(errors, [0.1, 0.2, 0.3, 0.4]) == chosen


def test_an_utterance_cut_off_gives_its_best_path_so_far_and_is_counted(tmp_path: Path) -> None:
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
def test_a_search_that_lost_the_way_to_the_end_is_done_again_with_a_wider_beam(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beam: float, words: tuple[str, ...]
) -> None:
    # Silence fits best to the last frame, yet a sentence is one word: beam 6 keeps the word, beam 3 keeps it when three times
    # as wide, beam 1 never does.
    monkeypatch.setattr(decode, "FEWEST_ACTIVE", 0)
    model = TiedModel(["SIL", "A"], 4, 1, np.full(4, 0.5), lambda left, phone, right, state: 2 * phone + state, 2, 2)
    graph = build_graph(model, Pronounced({"A": [(("A",), 1.0)]}), one_of(["A"]), tmp_path)
    scores = np.tile(np.array([0, 0, -2, -2], np.float32), (10, 1))
    found = Decoder(graph, DecodeOptions(beam=beam, acoustic_scale=1.0)).decode(scores)
    assert (found.words, found.final) == (words, bool(words))


# ---------------------------------------------------------------------------------------------------------- mistakes


def spoiled(matrix: np.ndarray, value: float) -> np.ndarray:
    copy = matrix.copy()
    copy[len(copy) // 2, 3] = value
    return copy


@pytest.mark.dist
@pytest.mark.parametrize("jobs", [1, 2])
def test_bad_scores_are_named_with_their_utterance(task: Task, jobs: int) -> None:
    _, _, graph, _, scores = task
    good = scores["s0-00"]
    bad = {
        "shape": good[:0],
        "1 pdfs for a graph of": good[:, :1],
        "not a number": spoiled(good, np.nan),
        "infinite": spoiled(good, np.inf),
    }
    for told, matrix in list(bad.items())[:: 1 if jobs == 1 else 3]:
        with pytest.raises(DataError, match=told) as error:
            decode_all(graph, {"u1": good, "u2": matrix}.__getitem__, ["u1", "u2"], jobs=jobs, progress="none")
        assert "utterance u2" in error.value.where
    for shape in ((0, graph.num_pdfs), (5,), (2, 3, 4)):
        with pytest.raises(DataError, match="shape"):
            Decoder(graph).decode(np.zeros(shape, np.float32))


def test_scores_of_minus_infinity_close_ways_and_may_close_all(task: Task) -> None:
    _, _, graph, _, scores = task
    decoder, matrix = Decoder(graph), scores["s0-00"].copy()
    assert decoder.decode(spoiled(matrix, -np.inf)).words == decoder.decode(matrix).words
    matrix[10] = -np.inf
    nothing = decoder.decode(matrix)
    assert (nothing.words, nothing.final, nothing.score) == ((), False, -np.inf)
    assert decoder.nbest(matrix, 3) == [nothing]


def test_a_list_without_an_utterance_is_named(task: Task, tmp_path: Path) -> None:
    _, _, graph, _, scores = task
    write_matrices(tmp_path / "scores.ark", tmp_path / "scores.scp", list(scores.items())[:2])
    with pytest.raises(DataError, match="no scores of utterance 'other'"):
        decode_all(graph, tmp_path / "scores.scp", [next(iter(scores)), "other"], progress="none")


@pytest.mark.parametrize("wrong", [{"beam": 0}, {"beam": float("nan")}, {"acoustic_scale": -1.0}, {"max_active": 1}])
def test_options_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        DecodeOptions(**wrong)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------- graphs from elsewhere


def with_transition_ids(graph: Graph, folder: Path, kind: str) -> np.ndarray:
    """The graph as Kaldi labels it: three transition-ids for each pdf, drawn at random. Returns the pdf of each."""
    assert graph.num_pdfs is not None
    dice = np.random.default_rng(0)
    pdfs = dice.permutation(np.repeat(np.arange(graph.num_pdfs), 3))
    ids = [np.flatnonzero(pdfs == pdf) + 1 for pdf in range(graph.num_pdfs)]
    found = arrays_of(read_fst(graph.fst))
    found.arcs["reads"] = [dice.choice(ids[label - 1]) if label else 0 for label in found.arcs["reads"]]
    write_arrays(folder / "HCLG.fst", found)
    if kind == "vector":
        kaldifst.StdVectorFst(read_fst(folder / "HCLG.fst")).write(str(folder / "HCLG.fst"))
    return np.concatenate([[-1], pdfs])


@pytest.mark.parametrize("kind", ["const", "vector"])
def test_a_graph_of_transition_ids_decodes_like_one_of_pdfs(task: Task, tmp_path: Path, kind: str) -> None:
    _, _, graph, _, scores = task
    transitions = with_transition_ids(graph, tmp_path, kind)
    theirs = own_graph(tmp_path / "HCLG.fst", graph.words, transitions=transitions)
    ours = decode_all(graph, scores.__getitem__, scores, progress="none")
    assert dict(decode_all(theirs, scores.__getitem__, scores, progress="none")) == dict(ours)
    plain = own_graph(graph.fst, graph.words, num_pdfs=graph.num_pdfs)
    assert dict(decode_all(plain, scores.__getitem__, scores, progress="none")) == dict(ours)


def test_a_graph_that_does_not_fit_is_refused_before_the_search(task: Task, tmp_path: Path) -> None:
    _, _, graph, _, scores = task
    transitions = with_transition_ids(graph, tmp_path, "const")
    fst, matrix = tmp_path / "HCLG.fst", scores["s0-00"]
    (tmp_path / "words.txt").write_text("<eps> 0\nonly 1\n")
    with pytest.raises(DataError, match="transition-id"):
        Decoder(own_graph(fst, graph.words, transitions=transitions[:-50]))
    with pytest.raises(DataError, match=r"final\.mdl"):
        Decoder(own_graph(fst, graph.words, num_pdfs=graph.num_pdfs))
    with pytest.raises(DataError, match="table of words"):
        Decoder(own_graph(fst, tmp_path / "words.txt", transitions=transitions))
    with pytest.raises(DataError, match="pdfs for a graph of"):
        Decoder(own_graph(fst, graph.words, transitions=transitions)).decode(matrix[:, :-1], "u")
    for content in ("<eps>\n", "a b c\n", "word -3\n"):
        (tmp_path / "words.txt").write_text(content)
        with pytest.raises(DataError, match="line 1"):
            Decoder(own_graph(fst, tmp_path / "words.txt", transitions=transitions))
