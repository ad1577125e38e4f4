"""Synthesize train, dev and test sets with a lexicon, text for a language model, and word times (`roundelay synth`).

Speakers and sentences of the sets are disjoint. Every utterance is a function of the seed and its number, independent of the
process that synthesizes it. The folder contains {train,dev,test}/ as Kaldi data directories (audio as FLAC below them;
`word_times` with utterance, word, start and end in seconds; `utt2snr`), lexicon.txt, lm.txt, and synth.json with the options
and speakers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from random import Random

import numpy as np

from roundelay.core.process_map import process_map
from roundelay.errors import UsageError
from roundelay.speech.corpora.kaldi_dir import write_data_dir
from roundelay.speech.corpora.utterance import Corpus, Utterance
from roundelay.speech.hmm.arpabet import from_ipa
from roundelay.speech.hmm.lexicon import Lexicon, from_counts, pronounce
from roundelay.speech.synth import espeak, grammar
from roundelay.speech.synth.channel import transmit, warp_vocal_tract
from roundelay.speech.synth.voices import ACCENTS, VARIANTS, Speaker, draw_speakers

SETS = ("train", "dev", "test")
BABBLE_TALKERS, BABBLE_S = 4, 10.0
LEXICON_SENTENCES = 1200
"""Sentences of the language model text from which pronunciations are counted."""


@dataclass(frozen=True)
class SynthOptions:
    """Options of a synthesized corpus.

    seed           seed of all random choices
    rate           samples per second: 8000 is a telephone line (300 to 3400 Hz, μ-law), 16000 a microphone
    snr            smallest and largest signal-to-noise ratio in dB; the ratio is drawn uniformly
    lm_sentences   sentences of text for the language model, none of which is in a set
    """

    seed: int = 0
    rate: int = 8000
    snr: tuple[float, float] = (0.0, 20.0)
    train_speakers: int = 160
    train_utterances: int = 4800
    dev_speakers: int = 24
    dev_utterances: int = 300
    test_speakers: int = 110
    test_utterances: int = 1100
    lm_sentences: int = 20000

    def __post_init__(self) -> None:
        if not 8000 <= self.rate <= 22050:
            raise UsageError(
                f"rate must be between 8000 and 22050 (got {self.rate})", where="synth", hint="choose 8000 or 16000"
            )
        if not self.snr[0] <= self.snr[1]:
            raise UsageError(
                f"snr must be (smallest, largest) (got {self.snr})", where="synth", hint="give the smaller ratio first"
            )
        for name in SETS:
            speakers, utterances = self.size(name)
            if not 0 < speakers <= utterances:
                raise UsageError(
                    f"{name} must have 1 <= speakers <= utterances (got {speakers} speakers, {utterances} utterances)",
                    where=f"synth, {name}",
                    hint="request at least one utterance of each speaker",
                )

    def size(self, name: str) -> tuple[int, int]:
        """Return the number of speakers and utterances of a set."""
        return getattr(self, f"{name}_speakers"), getattr(self, f"{name}_utterances")


@dataclass(frozen=True)
class _UtteranceJob:
    """One utterance to synthesize."""

    id: str
    words: tuple[str, ...]
    speaker: Speaker
    seed: tuple[int, ...]
    audio: Path
    options: SynthOptions


@dataclass(frozen=True)
class _UtteranceInfo:
    """Properties of a synthesized utterance: word times in seconds, duration, signal-to-noise ratio, kind of noise."""

    words: list[tuple[float, float]]
    seconds: float
    snr_db: float
    noise: str


def synthesize(folder: Path, options: SynthOptions, *, jobs: int = 1, progress: str = "auto") -> dict[str, Corpus]:
    """Write the corpus to `folder` and return its sets by name. synth.json is written last and marks a complete corpus."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "synth.json").unlink(missing_ok=True)
    _check_voices()
    texts = grammar.draw(options.seed, {**{name: options.size(name)[1] for name in SETS}, "lm": options.lm_sentences})
    speakers = draw_speakers(options.seed, {name: options.size(name)[0] for name in SETS})
    by_set = {name: _utterance_jobs(folder, name, texts[name], speakers[name], options) for name in SETS}
    all_jobs = [job for name in SETS for job in by_set[name]]
    results = process_map(_synthesize_utterance, all_jobs, jobs=jobs, progress=progress, what="synthesis")
    infos = dict(zip((job.id for job in all_jobs), results, strict=True))
    sets = {name: _write_set(folder / name, by_set[name], infos) for name in SETS}
    (folder / "lm.txt").write_text("".join(" ".join(words) + "\n" for words in texts["lm"]), encoding="utf-8")
    estimate_lexicon(texts["lm"][:LEXICON_SENTENCES]).write(folder / "lexicon.txt")
    metadata = {"options": asdict(options), "speakers": {name: [asdict(s) for s in speakers[name]] for name in SETS}}
    (folder / "synth.json").write_text(json.dumps(metadata, indent=1), encoding="utf-8")
    return sets


def _check_voices() -> None:
    missing = set(VARIANTS) - espeak.variants()
    if missing:
        raise UsageError(f"espeak-ng has no voice variants {', '.join(sorted(missing))}", hint="install espeakng-loader 0.2.4")


def _utterance_jobs(
    folder: Path, name: str, texts: Sequence[tuple[str, ...]], speakers: Sequence[Speaker], options: SynthOptions
) -> list[_UtteranceJob]:
    jobs = []
    for number, words in enumerate(texts):
        speaker = speakers[number % len(speakers)]
        id = f"{speaker.id}-{number // len(speakers):04d}"
        audio = folder / name / "flac" / speaker.id / f"{id}.flac"
        audio.parent.mkdir(parents=True, exist_ok=True)
        jobs.append(_UtteranceJob(id, words, speaker, (options.seed, SETS.index(name), number), audio, options))
    return sorted(jobs, key=lambda job: job.id)


def _synthesize_utterance(job: _UtteranceJob) -> _UtteranceInfo:
    """Synthesize, distort and write one utterance."""
    import soundfile

    rng = np.random.default_rng(job.seed)
    rate, warp = job.options.rate, job.speaker.warp
    speech = espeak.synthesize_words([word.lower() for word in job.words], job.speaker.voice, job.speaker.prosody(rng))
    samples = warp_vocal_tract(speech.samples, speech.rate, rate, warp)
    times = [(start / warp, end / warp) for start, end in speech.words]
    babble = _babble(job.options.seed, rate)
    audio = transmit(samples, (times[0][0], times[-1][1]), rate, rng, job.options.snr, babble)
    soundfile.write(job.audio, audio.samples, rate, format="FLAC", subtype="PCM_16")
    shifted = [(start + audio.lead_s, end + audio.lead_s) for start, end in times]
    return _UtteranceInfo(shifted, len(audio.samples) / rate, audio.snr_db, audio.kind)


@lru_cache(maxsize=1)
def _babble(seed: int, rate: int) -> np.ndarray:
    """Return babble noise: several speakers at once, the same for all utterances of a corpus."""
    rng = np.random.default_rng([seed, 0xBABB])
    talkers = draw_speakers(seed ^ 0xBABB, {"babble": BABBLE_TALKERS})["babble"]
    total = int(BABBLE_S * rate)
    mixed = np.zeros(total, np.float32)
    for talker in talkers:
        pieces: list[np.ndarray] = []
        for sentence in grammar.sentences(Random(f"babble {seed} {talker.id}")):
            speech = espeak.synthesize_words([word.lower() for word in sentence], talker.voice, talker.prosody(rng))
            pieces.append(warp_vocal_tract(speech.samples, speech.rate, rate, talker.warp))
            if sum(map(len, pieces)) >= total:
                break
        voice = np.concatenate(pieces)[:total]
        mixed += voice / np.sqrt(np.mean(np.square(voice)))
    return mixed


def _write_set(folder: Path, jobs: Sequence[_UtteranceJob], infos: dict[str, _UtteranceInfo]) -> Corpus:
    """Write a data directory with word_times, utt2dur and utt2snr."""
    corpus = write_data_dir(folder, [Utterance(job.id, job.speaker.id, job.words, job.audio) for job in jobs])
    with (folder / "word_times").open("w", encoding="utf-8") as times:
        for job in jobs:
            for word, (start, end) in zip(job.words, infos[job.id].words, strict=True):
                times.write(f"{job.id} {word} {start:.3f} {end:.3f}\n")
    rows = [(job.id, infos[job.id]) for job in jobs]
    (folder / "utt2dur").write_text("".join(f"{id} {info.seconds:.3f}\n" for id, info in rows))
    (folder / "utt2snr").write_text("".join(f"{id} {info.snr_db:.2f} {info.noise}\n" for id, info in rows))
    return corpus


def estimate_lexicon(texts: Sequence[tuple[str, ...]]) -> Lexicon:
    """Return the pronunciations of the grammar's words with their frequencies, counted in these sentences in all accents."""
    counts: dict[str, dict[tuple[str, ...], int]] = {}
    for accent in ACCENTS:
        for words, ipa in zip(texts, espeak.phonemes([" ".join(words).lower() for words in texts], accent), strict=True):
            parts = ipa.split()
            if len(parts) != len(words):
                continue  # espeak-ng joins some words ("in the") and does not report the boundary
            for word, part in zip(words, parts, strict=True):
                phones = from_ipa(part)
                pronunciations = counts.setdefault(word, {})
                pronunciations[phones] = pronunciations.get(phones, 0) + 1
    missing = [word for word in grammar.vocabulary() if word not in counts]
    return from_counts(counts).merged(pronounce(missing, ACCENTS)) if missing else from_counts(counts)
