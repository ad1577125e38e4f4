"""`roundelay synth`: train, dev and test sets of synthetic speech, with lexicon, text for a language model, and word times.

Speakers and sentences of the sets are disjoint. Every utterance is a function of the seed and its own name, whatever process
makes it. In the folder: {train,dev,test}/ as Kaldi data directories (audio as FLAC below them; `word_times` with utterance,
word, start and end in seconds; `utt2snr`), lexicon.txt, lm.txt, synth.json with the options and speakers.
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
from roundelay.speech.corpora.data_dir import Corpus, Utterance, write_data_dir
from roundelay.speech.hmm.arpabet import from_ipa
from roundelay.speech.hmm.lexicon import Lexicon, from_counts, pronounce
from roundelay.speech.synth import espeak, grammar
from roundelay.speech.synth.channel import transmit, warped
from roundelay.speech.synth.voices import ACCENTS, VARIANTS, Speaker, draw_speakers

SETS = ("train", "dev", "test")
BABBLE_TALKERS, BABBLE_S = 4, 10.0
LEXICON_SENTENCES = 1200
"""Sentences of the language model's text whose sounds are counted for the lexicon."""


@dataclass(frozen=True)
class SynthOptions:
    """seed      everything is drawn from it
    rate         8000 is a telephone line (300 to 3400 Hz, μ-law), 16000 a microphone
    snr          least and greatest signal-to-noise ratio in dB, drawn uniformly
    lm_sentences sentences of text for the language model, none of them in a set
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
            raise UsageError(f"rate is {self.rate}", where="synth", hint="choose 8000 or 16000")
        if not self.snr[0] <= self.snr[1]:
            raise UsageError(f"snr goes from {self.snr[0]} to {self.snr[1]} dB", where="synth", hint="least first")
        for name in SETS:
            speakers, utterances = self.size(name)
            if not 0 < speakers <= utterances:
                raise UsageError(
                    f"{utterances} utterances of {speakers} speakers", where=f"synth, {name}", hint="at least one each"
                )

    def size(self, name: str) -> tuple[int, int]:
        return getattr(self, f"{name}_speakers"), getattr(self, f"{name}_utterances")


@dataclass(frozen=True)
class _Order:
    """One utterance to be made: all that a process must know."""

    id: str
    words: tuple[str, ...]
    speaker: Speaker
    dice: tuple[int, ...]
    audio: Path
    options: SynthOptions


@dataclass(frozen=True)
class _Receipt:
    words: list[tuple[float, float]]
    seconds: float
    snr_db: float
    noise: str


def synthesize(folder: Path, options: SynthOptions, *, jobs: int = 1, progress: str = "auto") -> dict[str, Corpus]:
    """Makes the corpus; returns its sets by name."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "synth.json").unlink(missing_ok=True)
    _check_voices()
    texts = grammar.draw(options.seed, {**{name: options.size(name)[1] for name in SETS}, "lm": options.lm_sentences})
    speakers = draw_speakers(options.seed, {name: options.size(name)[0] for name in SETS})
    orders = {name: _orders(folder, name, texts[name], speakers[name], options) for name in SETS}
    everything = [order for name in SETS for order in orders[name]]
    receipts = dict(
        zip(
            (o.id for o in everything),
            process_map(_make, everything, jobs=jobs, progress=progress, what="speaking"),
            strict=True,
        )
    )
    sets = {name: _write_set(folder / name, orders[name], receipts) for name in SETS}
    (folder / "lm.txt").write_text("".join(" ".join(words) + "\n" for words in texts["lm"]), encoding="utf-8")
    heard_lexicon(texts["lm"][:LEXICON_SENTENCES]).write(folder / "lexicon.txt")
    about = {"options": asdict(options), "speakers": {name: [asdict(s) for s in speakers[name]] for name in SETS}}
    (folder / "synth.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
    return sets


def _check_voices() -> None:
    absent = set(VARIANTS) - espeak.variants()
    if absent:
        raise UsageError(
            f"this espeak-ng lacks voice variants: {', '.join(sorted(absent))}", hint="install espeakng-loader 0.2.4"
        )


def _orders(
    folder: Path, name: str, texts: Sequence[tuple[str, ...]], speakers: Sequence[Speaker], options: SynthOptions
) -> list[_Order]:
    orders = []
    for number, words in enumerate(texts):
        speaker = speakers[number % len(speakers)]
        id = f"{speaker.id}-{number // len(speakers):04d}"
        audio = folder / name / "flac" / speaker.id / f"{id}.flac"
        audio.parent.mkdir(parents=True, exist_ok=True)
        orders.append(_Order(id, words, speaker, (options.seed, SETS.index(name), number), audio, options))
    return sorted(orders, key=lambda order: order.id)


def _make(order: _Order) -> _Receipt:
    """Says, perturbs and writes one utterance."""
    import soundfile

    dice = np.random.default_rng(order.dice)
    rate, warp = order.options.rate, order.speaker.warp
    said = espeak.say([word.lower() for word in order.words], order.speaker.voice, order.speaker.manner(dice))
    speech = warped(said.samples, said.rate, rate, warp)
    times = [(start / warp, end / warp) for start, end in said.words]
    babble = _babble(order.options.seed, rate)
    heard = transmit(speech, (times[0][0], times[-1][1]), rate, dice, order.options.snr, babble)
    soundfile.write(order.audio, heard.samples, rate, format="FLAC", subtype="PCM_16")
    shifted = [(start + heard.lead_s, end + heard.lead_s) for start, end in times]
    return _Receipt(shifted, len(heard.samples) / rate, heard.snr_db, heard.kind)


@lru_cache(maxsize=1)
def _babble(seed: int, rate: int) -> np.ndarray:
    """A room full of talk: several speakers over each other, the same for all utterances of a corpus."""
    dice = np.random.default_rng([seed, 0xBABB])
    talkers = draw_speakers(seed ^ 0xBABB, {"babble": BABBLE_TALKERS})["babble"]
    total = int(BABBLE_S * rate)
    mixed = np.zeros(total, np.float32)
    for talker in talkers:
        pieces: list[np.ndarray] = []
        for sentence in grammar.sentences(Random(f"babble {seed} {talker.id}")):
            said = espeak.say([word.lower() for word in sentence], talker.voice, talker.manner(dice))
            pieces.append(warped(said.samples, said.rate, rate, talker.warp))
            if sum(map(len, pieces)) >= total:
                break
        voice = np.concatenate(pieces)[:total]
        mixed += voice / np.sqrt(np.mean(np.square(voice)))
    return mixed


def _write_set(folder: Path, orders: Sequence[_Order], receipts: dict[str, _Receipt]) -> Corpus:
    made = write_data_dir(folder, [Utterance(o.id, o.speaker.id, o.words, o.audio) for o in orders])
    with (folder / "word_times").open("w", encoding="utf-8") as times:
        for order in orders:
            for word, (start, end) in zip(order.words, receipts[order.id].words, strict=True):
                times.write(f"{order.id} {word} {start:.3f} {end:.3f}\n")
    found = [(order.id, receipts[order.id]) for order in orders]
    (folder / "utt2dur").write_text("".join(f"{id} {r.seconds:.3f}\n" for id, r in found))
    (folder / "utt2snr").write_text("".join(f"{id} {r.snr_db:.2f} {r.noise}\n" for id, r in found))
    return made


def heard_lexicon(texts: Sequence[tuple[str, ...]]) -> Lexicon:
    """Pronunciations of the grammar's words as all accents say them in these sentences, with their frequencies."""
    counts: dict[str, dict[tuple[str, ...], int]] = {}
    for accent in ACCENTS:
        for words, ipa in zip(texts, espeak.phonemes([" ".join(words).lower() for words in texts], accent), strict=True):
            parts = ipa.split()
            if len(parts) != len(words):
                continue  # espeak-ng runs some words together ("in the"): whose sound is whose is not told
            for word, part in zip(words, parts, strict=True):
                phones = from_ipa(part)
                heard = counts.setdefault(word, {})
                heard[phones] = heard.get(phones, 0) + 1
    absent = [word for word in grammar.vocabulary() if word not in counts]
    return from_counts(counts).merged(pronounce(absent, ACCENTS)) if absent else from_counts(counts)
