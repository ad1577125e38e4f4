"""Lexicons: Kaldi's two formats, words without pronunciation, pronunciations by espeak-ng."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from roundelay.errors import DataError, UsageError
from roundelay.speech.hmm.arpabet import from_ipa
from roundelay.speech.hmm.lexicon import Lexicon, from_counts, pronounce

PLAIN = "HELLO HH AH L OW\nHELLO HH EH L OW\nTHE DH AH\nONE W AH N\n!SIL SIL\n"


def test_lexicon_of_kaldi_is_read(tmp_path: Path) -> None:
    (tmp_path / "lexicon.txt").write_text(PLAIN)
    lexicon = Lexicon.read(tmp_path / "lexicon.txt")
    assert lexicon.entries["HELLO"] == [(("HH", "AH", "L", "OW"), 1.0), (("HH", "EH", "L", "OW"), 1.0)]
    assert lexicon.phones == ["AH", "DH", "EH", "HH", "L", "N", "OW", "W"]
    assert lexicon.missing(["ONE", "TWO", "THE", "TWO", "ALSO"]) == ["ALSO", "TWO"]


def test_lexicons_survive_writing_and_reading(tmp_path: Path) -> None:
    (tmp_path / "lexicon.txt").write_text(PLAIN)
    first = Lexicon.read(tmp_path / "lexicon.txt")
    first.write(tmp_path / "again.txt")
    assert Lexicon.read(tmp_path / "again.txt").entries == first.entries
    weighted = Lexicon({"A": [(("AH",), 1.0), (("EY",), 0.25)], "B": [(("B", "IY"), 1.0)]})
    weighted.write(tmp_path / "lexiconp.txt")
    assert (tmp_path / "lexiconp.txt").read_text() == "A 1 AH\nA 0.25 EY\nB 1 B IY\n"
    assert Lexicon.read(tmp_path / "lexiconp.txt").entries == weighted.entries


@pytest.mark.parametrize(
    ("content", "what", "line"),
    [
        ("ONE W AH N\nTWO\n", "'TWO' has no phones", 2),
        ("ONE W AH N\n\nONE W AH N\n", "'ONE' has the same pronunciation twice", 3),
        ("ONE 0.5 W AH N\nTWO T UW\n", "'ONE' has a number among its phones", 1),
        ("ONE 0.5 W AH N\nTWO 1.5 T UW\n", "the probability of 'TWO' must be above 0 and at most 1 (got 1.5)", 2),
        ("ONE 0.5 W AH N\nTWO nan T UW\n", "the probability of 'TWO' must be above 0 and at most 1 (got nan)", 2),
        ("ONE 0.5 W AH N\nTWO 1\n", "'TWO' has no phones", 2),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, content: str, what: str, line: int) -> None:
    (tmp_path / "lexicon.txt").write_text(content)
    with pytest.raises(DataError) as caught:
        Lexicon.read(tmp_path / "lexicon.txt")
    assert what in caught.value.message
    assert f"lexicon.txt, line {line}" in caught.value.where


def test_files_without_a_lexicon_raise(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    for name, what in (("none.txt", "cannot read"), ("empty.txt", "is empty")):
        with pytest.raises(DataError, match=what):
            Lexicon.read(tmp_path / name)


def test_error_names_words_without_pronunciation() -> None:
    lexicon = Lexicon({"ONE": [(("W", "AH", "N"), 1.0)]})
    lexicon.require(["ONE"], where="text")
    with pytest.raises(DataError, match=r"2 words have no pronunciation: BLUE, TWO[\s\S]*where: train/text"):
        lexicon.require(["TWO", "ONE", "BLUE"], where="train/text")
    with pytest.raises(DataError, match="and 5 more"):
        lexicon.require([f"W{n}" for n in range(15)], where="text")


def test_rare_pronunciations_are_left_out() -> None:
    lexicon = from_counts({"A": {("EY",): 10, ("AH",): 40, ("AA",): 1}})
    assert lexicon.entries == {"A": [(("AH",), 1.0), (("EY",), 0.25)]}


@pytest.mark.parametrize(
    ("ipa", "phones"),
    [
        ("w_ˈɔː_ɾ_ɚ", "W AO T ER"),
        ("tʃ_ˈɜː_tʃ", "CH ER CH"),
        ("b_ˈʌ_ʔ_n̩", "B AH T AH N"),
        ("f_ˈoːɹ", "F AO R"),
        ("k_ˈeə", "K EH AH"),
        ("ɡ_ˈoʊ_ɪ_ŋ", "G OW IH NG"),
        ("θ_ˈɜː_d", "TH ER D"),
        ("dʒ_ˈuː_n", "JH UW N"),
        ("f_ˈaɪɚ", "F AY ER"),
    ],
)
def test_ipa_becomes_arpabet(ipa: str, phones: str) -> None:
    assert from_ipa(ipa) == tuple(phones.split())


def test_ipa_without_arpabet_phone_raises() -> None:
    with pytest.raises(DataError, match="the sound 'ɣ' has no ARPAbet phone"):
        from_ipa("ɣ_a")


def test_new_words_are_pronounced() -> None:
    pytest.importorskip("espeakng_loader")
    lexicon = pronounce(["KITCHEN", "THE", "A", "THREE", "DON'T"])
    assert lexicon.entries["KITCHEN"][0][0] == ("K", "IH", "CH", "AH", "N")
    assert lexicon.entries["THREE"][0][0] == ("TH", "R", "IY")
    assert ("AH",) in [phones for phones, _ in lexicon.entries["A"]]
    assert lexicon.entries["DON'T"][0][0] == ("D", "OW", "N", "T")
    both = pronounce(["CAR"], accents=("en-us", "en"))
    assert {phones for phones, _ in both.entries["CAR"]} == {("K", "AA", "R"), ("K", "AA")}
    with pytest.raises(DataError, match="how to say"):
        pronounce(["..."])


def test_error_without_espeak_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    with pytest.raises(UsageError, match=r"pip install 'roundelay\[speech\]'"):
        pronounce(["ONE"])
