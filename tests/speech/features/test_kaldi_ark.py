"""Kaldi files: compatible with kaldiio in both directions; nothing in them is executed or unpickled."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest

from roundelay.errors import DataError
from roundelay.speech.features.kaldi_ark import (
    read_matrices,
    read_pdf_alignments,
    read_transitions,
    write_matrices,
)

kaldiio = pytest.importorskip("kaldiio")
rng = np.random.default_rng(0)
MATRICES = {f"utt{n}": rng.normal(size=(20 + n, 7)).astype(np.float32) for n in range(3)}


def test_written_matrices_read_back(tmp_path: Path) -> None:
    assert write_matrices(tmp_path / "x.ark", tmp_path / "x.scp", MATRICES.items()) == 3
    ours, theirs = read_matrices(tmp_path / "x.scp"), kaldiio.load_scp(str(tmp_path / "x.scp"))
    assert list(ours) == list(MATRICES)
    assert "utt1" in ours
    assert len(ours) == 3
    for id, x in MATRICES.items():
        assert np.array_equal(ours[id], x)
        assert np.array_equal(theirs[id], x)
        assert ours.shape(id) == x.shape
    with pytest.raises(DataError, match=r"must have 2 dimensions \(got 1\)"):
        write_matrices(tmp_path / "y.ark", tmp_path / "y.scp", [("a", np.zeros(3))])


@pytest.mark.parametrize("compression", [1, 2, 3, 4, 5, 6, 7])
def test_compressed_matrices_of_kaldiio_are_read(tmp_path: Path, compression: int) -> None:
    kaldiio.save_ark(str(tmp_path / "x.ark"), MATRICES, scp=str(tmp_path / "x.scp"), compression_method=compression)
    ours, theirs = read_matrices(tmp_path / "x.scp"), kaldiio.load_scp(str(tmp_path / "x.scp"))
    for id in MATRICES:
        assert ours.shape(id) == MATRICES[id].shape
        assert np.allclose(ours[id], theirs[id], atol=2e-5)


def test_double_and_text_matrices_and_vectors_are_read(tmp_path: Path) -> None:
    double = {id: x.astype(np.float64) for id, x in MATRICES.items()}
    kaldiio.save_ark(str(tmp_path / "d.ark"), double, scp=str(tmp_path / "d.scp"))
    assert np.array_equal(read_matrices(tmp_path / "d.scp")["utt2"], MATRICES["utt2"])
    kaldiio.save_ark(str(tmp_path / "t.ark"), MATRICES, scp=str(tmp_path / "t.scp"), text=True)
    matrices = read_matrices(tmp_path / "t.scp")
    assert np.allclose(matrices["utt1"], MATRICES["utt1"], atol=1e-5)
    assert matrices.shape("utt1") == (21, 7)
    kaldiio.save_ark(str(tmp_path / "v.ark"), {"a": MATRICES["utt0"][0]}, scp=str(tmp_path / "v.scp"))
    assert np.array_equal(read_matrices(tmp_path / "v.scp")["a"], MATRICES["utt0"][:1])


def test_archives_are_found_in_the_folder_of_their_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_matrices(tmp_path / "x.ark", tmp_path / "x.scp", MATRICES.items())
    text = (tmp_path / "x.scp").read_text()
    (tmp_path / "x.scp").write_text(text.replace(str(tmp_path.resolve()) + "/", ""))
    monkeypatch.chdir("/")
    assert np.array_equal(read_matrices(tmp_path / "x.scp")["utt0"], MATRICES["utt0"])


def test_lists_with_commands_are_rejected(tmp_path: Path) -> None:
    trace = tmp_path / "it-ran"
    (tmp_path / "x.scp").write_text(f"utt0 x.ark:5\nutt1 touch {trace} |\n")
    with pytest.raises(DataError, match=r"must be a file \(got a command") as caught:
        read_matrices(tmp_path / "x.scp")
    assert "line 2" in caught.value.where
    assert not trace.exists()


class Trap:
    """An object that ends the process when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('unpickled')",)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"\0BFM \x04" + b"\xff\xff\xff\x7f" * 2, "unknown size|impossible matrix size"),
        (b"\0BFM \x04\x03\0\0\0\x04\x03\0\0\0abc", "ends in the middle"),
        (b"\0BXY \x04", "unknown kind"),
        (b"PKL" + pickle.dumps(Trap()), "cannot be read"),
        (b"", "ends in the middle"),
        (b" [ 1 2\n 3 ]\n", "text form"),
        (b" [ 1 2\n", "no end"),
        (b"\0C", "no value begins"),
    ],
)
def test_corrupt_matrices_are_named(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "x.ark").write_bytes(content)
    (tmp_path / "x.scp").write_text("utt9 x.ark\n")
    with pytest.raises(DataError, match=what) as caught:
        read_matrices(tmp_path / "x.scp")["utt9"]
    assert "utt9" in caught.value.message
    assert "x.ark" in caught.value.where


def test_invalid_lists_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "x.scp").write_text("a x.ark:1\na x.ark:2\n")
    with pytest.raises(DataError, match="duplicate entry"):
        read_matrices(tmp_path / "x.scp")
    (tmp_path / "x.scp").write_text("a x.ark:1[0:3]\n")
    with pytest.raises(DataError, match="ranges"):
        read_matrices(tmp_path / "x.scp")
    with pytest.raises(DataError, match="cannot read"):
        read_matrices(tmp_path / "none.scp")
    (tmp_path / "x.scp").write_text("a none.ark:1\n")
    with pytest.raises(DataError, match="cannot be read"):
        read_matrices(tmp_path / "x.scp")["a"]


# --------------------------------------------------------------------------------------------------------- alignments

PDFS = {"utt0": np.array([3, 3, 0, 17], np.int32), "utt1": np.array([1], np.int32), "utt2": np.arange(400, dtype=np.int32)}


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("zipped", [False, True])
def test_pdf_alignments_are_read(tmp_path: Path, text: bool, zipped: bool) -> None:
    path = tmp_path / "pdf.ark"
    if text:
        path.write_text("".join(f"{id} {' '.join(map(str, states))} \n" for id, states in PDFS.items()))
    else:
        kaldiio.save_ark(str(path), PDFS)
    if zipped:
        (tmp_path / "ali.1.gz").write_bytes(gzip.compress(path.read_bytes()))
        path = tmp_path / "ali.1.gz"
    alignments = read_pdf_alignments(path)
    assert alignments.keys() == PDFS.keys()
    for id, states in PDFS.items():
        assert np.array_equal(alignments[id], states)
        assert alignments[id].dtype == np.int32


def test_a_folder_of_alignments_is_read(tmp_path: Path) -> None:
    for n, (id, states) in enumerate(PDFS.items(), 1):
        kaldiio.save_ark(str(tmp_path / "one"), {id: states})
        (tmp_path / f"ali.{n}.gz").write_bytes(gzip.compress((tmp_path / "one").read_bytes()))
    assert sorted(read_pdf_alignments(tmp_path)) == sorted(PDFS)
    (tmp_path / "ali.9.gz").write_bytes((tmp_path / "ali.1.gz").read_bytes())
    with pytest.raises(DataError, match="aligned twice"):
        read_pdf_alignments(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match="no alignments"):
        read_pdf_alignments(empty)


@pytest.mark.parametrize("content", [b"utt0 \0B\x04\x09\0\0\0\x04\x01\0\0\0", b"utt0 1 2 x\n", b"utt0 -1\n", b"utt0 \0B\x05\0"])
def test_corrupt_alignments_are_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ali").write_bytes(content)
    with pytest.raises(DataError, match=r"corrupt|negative"):
        read_pdf_alignments(tmp_path / "ali")
    with pytest.raises(DataError, match="cannot read"):
        read_pdf_alignments(tmp_path / "none")
    (tmp_path / "ali.gz").write_bytes(b"not zipped")
    with pytest.raises(DataError, match="cannot read"):
        read_pdf_alignments(tmp_path / "ali.gz")


# -------------------------------------------------------------------------------------------------------- transitions

MODEL = """<TransitionModel>
<Topology>
<TopologyEntry>
<ForPhones>
2 3
</ForPhones>
<State> 0 <PdfClass> 0 <Transition> 0 0.75 <Transition> 1 0.25 </State>
<State> 1 <PdfClass> 1 <Transition> 1 0.75 <Transition> 2 0.25 </State>
<State> 2 </State>
</TopologyEntry>
<TopologyEntry>
<ForPhones>
1
</ForPhones>
<State> 0 <PdfClass> 0 <Transition> 0 0.5 <Transition> 1 0.25 <Transition> 2 0.25 </State>
<State> 1 <PdfClass> 1 <Transition> 1 0.75 <Transition> 2 0.25 </State>
<State> 2 </State>
</TopologyEntry>
</Topology>
<Triples> 5
1 0 0
1 1 1
2 0 2
2 1 4
3 0 3
</Triples>
<LogProbs>
 [ 0 -0.7 -1.4 -1.4 -0.3 -1.4 -0.3 -1.4 -0.3 -1.4 -0.3 -1.4 ]
</LogProbs>
</TransitionModel>
<DIMENSION> 39 <NUMPDFS> 5
"""
PDF_OF = [-1, 0, 0, 0, 1, 1, 2, 2, 4, 4, 3, 3]


def test_transitions_of_a_text_model(tmp_path: Path) -> None:
    (tmp_path / "final.txt").write_text(MODEL)
    table = read_transitions(tmp_path / "final.txt")
    assert table.tolist() == PDF_OF
    kaldiio.save_ark(str(tmp_path / "ali"), {"utt0": np.array([1, 4, 8, 11], np.int32)})
    assert read_pdf_alignments(tmp_path / "ali", table)["utt0"].tolist() == [0, 1, 4, 3]
    kaldiio.save_ark(str(tmp_path / "ali"), {"utt0": np.array([1, 12], np.int32)})
    with pytest.raises(DataError, match="transition-id that is not in the model"):
        read_pdf_alignments(tmp_path / "ali", table)


def test_transitions_of_a_chain_model(tmp_path: Path) -> None:
    """In a chain model the self-loop has its own pdf."""
    text = MODEL.replace("<Triples> 5", "<Tuples> 2").replace("</Triples>", "</Tuples>")
    text = text.replace("1 0 0\n1 1 1\n2 0 2\n2 1 4\n3 0 3\n", "1 0 0 7\n2 1 4 9\n")
    (tmp_path / "final.txt").write_text(text)
    assert read_transitions(tmp_path / "final.txt").tolist() == [-1, 7, 0, 0, 9, 4]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (("<Triples> 5", "<Triples> 6"), "6 rows are announced, 5 are present"),
        (("<Topology>", "<Typology>"), "no <Topology>"),
        (("3 0 3", "4 0 3"), r"cannot be read: \(4, 0\)"),
        (("3 0 3", "3 0"), "cannot be read"),
        (("<TransitionModel>", "\0B<TransitionModel>"), "must be in text form"),
    ],
)
def test_invalid_models_are_rejected(tmp_path: Path, change: tuple[str, str], what: str) -> None:
    (tmp_path / "final.txt").write_text(MODEL.replace(*change))
    with pytest.raises(DataError, match=what):
        read_transitions(tmp_path / "final.txt")
    with pytest.raises(DataError, match="cannot read the model"):
        read_transitions(tmp_path / "none")
