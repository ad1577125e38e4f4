"""The synthesized corpus: bit-reproducible, disjoint speakers and sentences, correct noise levels and word times."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from roundelay.errors import UsageError
from roundelay.speech.corpora.kaldi_dir import read_data_dir
from roundelay.speech.features.audio import read_audio
from roundelay.speech.hmm.arpabet import PHONES
from roundelay.speech.hmm.lexicon import Lexicon
from roundelay.speech.synth import espeak, grammar
from roundelay.speech.synth.channel import transmit, warp_vocal_tract
from roundelay.speech.synth.corpus import SETS, SynthOptions, synthesize
from roundelay.speech.synth.voices import ACCENTS, VARIANTS, draw_speakers

pytest.importorskip("espeakng_loader", reason="the extra 'synth' is not installed")
pytest.importorskip("soxr")

SMALL = SynthOptions(
    seed=5,
    train_speakers=6,
    train_utterances=18,
    dev_speakers=2,
    dev_utterances=4,
    test_speakers=4,
    test_utterances=8,
    lm_sentences=400,
)
SENTENCE = ["static", "on", "the", "light", "in", "the", "kitchen"]


@pytest.fixture(scope="module")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spoken")
    synthesize(folder, SMALL, progress="none")
    return folder


# ------------------------------------------------------------------------------------------------------------- corpus


def test_sets_are_data_directories(corpus_folder: Path) -> None:
    for name in SETS:
        corpus = read_data_dir(corpus_folder / name)
        speakers, utterances = SMALL.size(name)
        assert (len(corpus.speakers), len(corpus)) == (speakers, utterances)
        for utterance in corpus.utterances:
            samples = read_audio(utterance, 8000)
            assert 0.5 < len(samples) / 8000 < 10
            assert 0.01 < np.abs(samples).max() < 1


def test_speakers_and_sentences_are_disjoint(corpus_folder: Path) -> None:
    sets = {name: read_data_dir(corpus_folder / name) for name in SETS}
    texts = [{u.words for u in sets[name].utterances} for name in SETS]
    texts.append({tuple(line.split()) for line in (corpus_folder / "lm.txt").read_text().splitlines()})
    assert sum(map(len, texts)) == len(set().union(*texts)) == 18 + 4 + 8 + 400
    metadata = json.loads((corpus_folder / "synth.json").read_text())
    pairs = [{(s["variant"], s["accent"]) for s in metadata["speakers"][name]} for name in SETS]
    assert sum(map(len, pairs)) == len(set().union(*pairs))


def test_every_word_has_a_pronunciation(corpus_folder: Path) -> None:
    lexicon = Lexicon.read(corpus_folder / "lexicon.txt")
    assert lexicon.missing(grammar.vocabulary()) == []
    assert set(lexicon.phones) <= {phone for phones in PHONES.values() for phone in phones}
    assert lexicon.entries["KITCHEN"][0][0] == ("K", "IH", "CH", "AH", "N")


def test_word_times_lie_within_the_audio_in_order(corpus_folder: Path) -> None:
    rows = [line.split() for line in (corpus_folder / "test" / "word_times").read_text().splitlines()]
    corpus = read_data_dir(corpus_folder / "test")
    for utterance in corpus.utterances:
        own = [(word, float(start), float(end)) for id, word, start, end in rows if id == utterance.id]
        assert tuple(word for word, _, _ in own) == utterance.words
        times = [t for _, start, end in own for t in (start, end)]
        assert times == sorted(times)
        assert 0.1 <= times[0]
        assert times[-1] < len(read_audio(utterance, 8000)) / 8000


def test_the_same_seed_gives_the_same_bytes_in_any_process(corpus_folder: Path, tmp_path: Path) -> None:
    synthesize(tmp_path, SMALL, jobs=2, progress="none")
    files = sorted(path.relative_to(corpus_folder) for path in corpus_folder.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    for path in files:
        assert (corpus_folder / path).read_bytes() == (tmp_path / path).read_bytes(), path


def test_invalid_options_and_missing_packages_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ({"rate": 44100}, {"snr": (20.0, 0.0)}, {"test_speakers": 0}, {"dev_utterances": 3}):
        with pytest.raises(UsageError):
            SynthOptions(**wrong)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    with pytest.raises(UsageError, match=r"pip install 'roundelay\[speech\]'"):
        synthesize(tmp_path, SMALL, progress="none")


# ------------------------------------------------------------------------------------------------------------ grammar


def test_the_grammar_is_rich_enough() -> None:
    words = grammar.vocabulary()
    assert len(words) >= 250
    sets = grammar.draw(1, {"train": 4800, "lm": 8000})
    assert len({*sets["train"], *sets["lm"]}) == 12800
    assert {word for sentence in sets["lm"] for word in sentence} == set(words)
    assert 5 < np.mean([len(sentence) for sentence in sets["train"]]) < 8
    assert grammar.draw(1, {"train": 4800, "lm": 8000}) == sets
    assert grammar.draw(2, {"train": 10})["train"] != sets["train"][:10]


def test_the_perplexity_of_a_bigram_is_in_range() -> None:
    ngram = pytest.importorskip("roundelay.speech.graph.ngram")
    sets = grammar.draw(0, {"test": 600, "lm": 20000})
    model = ngram.estimate(sets["lm"], order=2, vocabulary=grammar.vocabulary())
    assert 12 <= model.perplexity(sets["test"]) <= 20


# ------------------------------------------------------------------------------------------------------------- voices


def test_default_sets_have_distinct_voices() -> None:
    options = SynthOptions()
    speakers = draw_speakers(0, {name: options.size(name)[0] for name in SETS})
    assert len(speakers["test"]) >= 100
    pairs = [(s.variant, s.accent) for name in SETS for s in speakers[name]]
    assert len(set(pairs)) == len(pairs), "every voice occurs once"


def test_variants_exist_and_unknown_voices_are_rejected() -> None:
    assert set(VARIANTS) <= espeak.variants()
    assert len(set(VARIANTS)) == len(VARIANTS) >= 40
    for wrong in ("en-us+unknown", "en-gb", "en-us+m3+m4"):
        with pytest.raises(UsageError, match="has no voice"):
            espeak.synthesize_words(["hello"], wrong, espeak.Prosody())


def test_accents_differ_in_pronunciation() -> None:
    text = ["can you ask the teacher for the last bath towel of the summer over there"]
    transcriptions = {accent: espeak.phonemes(text, accent)[0] for accent in ACCENTS}
    assert len(set(transcriptions.values())) == len(ACCENTS), transcriptions


def test_speech_depends_on_its_arguments_only() -> None:
    first = {}
    for turn, variants in enumerate((VARIANTS, VARIANTS[::-1])):
        for n, variant in enumerate(variants):
            accent = ACCENTS[len(variant) % len(ACCENTS)]
            speech = espeak.synthesize_words(
                SENTENCE[: 2 + len(variant) % 3], f"{accent}+{variant}", espeak.Prosody(pitch=30 + len(variant))
            )
            if turn == 0:
                first[variant] = speech.samples
            else:
                assert np.array_equal(speech.samples, first[variant]), (n, variant)


def test_word_times_follow_the_sound() -> None:
    """Words do not overlap, and words that espeak-ng reports as one are separated."""
    speech = espeak.synthesize_words(SENTENCE, "en-us+m3", espeak.Prosody(gap=20))
    loud = np.abs(speech.samples.astype(float))
    assert len(speech.words) == len(SENTENCE)
    for (_, end), (start, _) in zip(speech.words, speech.words[1:], strict=False):
        assert end <= start + 1e-9
    for start, end in speech.words:
        assert 0.02 < end - start < 0.8
        assert loud[int(start * speech.rate) : int(end * speech.rate)].mean() > 300
    quick = espeak.synthesize_words(SENTENCE, "en-us+m3", espeak.Prosody())
    the = quick.words[2]
    assert 0.05 < the[1] - the[0] < 0.2


# -------------------------------------------------------------------------------------------------------------- noise


@pytest.mark.parametrize("rate", [8000, 16000])
def test_the_reported_signal_to_noise_ratio_is_correct(rate: int) -> None:
    speech = espeak.synthesize_words(SENTENCE, "en-us+m3", espeak.Prosody())
    samples = warp_vocal_tract(speech.samples, speech.rate, rate, 1.0)
    babble = np.random.default_rng(0).normal(size=rate).astype(np.float32)
    ratios = []
    for n in range(60):
        audio = transmit(
            samples, (speech.words[0][0], speech.words[-1][1]), rate, np.random.default_rng(n), (0.0, 20.0), babble
        )
        lead = round(audio.lead_s * rate)
        active = slice(lead + int(speech.words[0][0] * rate), lead + int(speech.words[-1][1] * rate))
        measured = 10 * np.log10(np.mean(audio.speech[active] ** 2) / np.mean(audio.noise**2))
        assert abs(measured - audio.snr_db) < 0.1
        assert np.abs(audio.samples).max() < 1
        error = audio.samples - audio.speech - audio.noise
        assert np.mean(error**2) < 0.003 * np.mean(audio.samples**2), "only μ-law changes the sum"
        ratios.append(audio.snr_db)
    assert 0 <= min(ratios) < 3
    assert 17 < max(ratios) <= 20
    assert 8 < np.mean(ratios) < 12


def test_a_shorter_vocal_tract_raises_the_resonances() -> None:
    tone = (8000 * np.sin(2 * np.pi * 1000 * np.arange(22050) / 22050)).astype(np.int16)
    for warp in (0.9, 1.1):
        warped = warp_vocal_tract(tone, 22050, 8000, warp)
        assert abs(len(warped) / 8000 - 1 / warp) < 0.01
        peak = np.abs(np.fft.rfft(warped)).argmax() * 8000 / len(warped)
        assert abs(peak - 1000 * warp) < 5


def test_synthesis_is_60_times_faster_than_real_time(tmp_path: Path) -> None:
    """Includes distortion and writing. CPU time is measured, so that other load matters little. Babble is cached before."""
    from roundelay.speech.synth import corpus

    options = SynthOptions(seed=5, train_utterances=160, dev_speakers=1, dev_utterances=1, test_speakers=1, test_utterances=1)
    texts = grammar.draw(5, {"train": 160})["train"]
    jobs = corpus._utterance_jobs(tmp_path, "train", texts, draw_speakers(5, {"train": 160})["train"], options)
    corpus._synthesize_utterance(jobs[0])
    start = time.thread_time()
    seconds = sum(corpus._synthesize_utterance(job).seconds for job in jobs[1:40])
    assert seconds / (time.thread_time() - start) > 60
