"""Call espeak-ng through its C interface: speech with the times of its words, and pronunciations.

espeak-ng is licensed under GPL-3, so it is an optional dependency (`pip install 'roundelay[speech]'`).

The library keeps state in static variables (phases, noise, leftover samples), so that repeated calls give different audio.
Every utterance here is synthesized by a newly loaded library, which takes about a millisecond, and depends on its arguments
only.
"""

from __future__ import annotations

import _ctypes
import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from roundelay.errors import DataError, RoundelayError, UsageError

SYNCHRONOUS, BUFFER_MS = 2, 500
PHONEME_EVENTS, DO_NOT_EXIT = 0x0001, 0x8000
RATE, PITCH, RANGE, WORD_GAP = 1, 3, 4, 7
UTF8, IPA = 1, 0x02
TEXT_POSITION_CHARACTERS = 1
END, WORD, PHONEME = 0, 1, 7
SEPARATOR = "_"
STOPS = frozenset({"p", "b", "t", "d", "k", "g", "t2", "t#", "d#", "tS", "dZ", "?", "p2", "t[", "d["})
"""Phonemes of espeak-ng that begin with a closure. The silence before their burst belongs to the word."""


class _Event(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("name", ctypes.c_char * 8),
    )


_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event))


@dataclass(frozen=True)
class Speech:
    """int16 samples, their rate, and the start and end of each word in seconds."""

    samples: np.ndarray
    rate: int
    words: list[tuple[float, float]]


@dataclass(frozen=True)
class Prosody:
    """Words per minute, pitch and pitch range (0 to 99), and pause between words in units of 10 ms."""

    rate: int = 175
    pitch: int = 50
    range: int = 50
    gap: int = 0


def _paths() -> tuple[str, str]:
    """Return the paths of the library and of its data. Raises UsageError if espeak-ng is not installed."""
    try:
        import espeakng_loader
    except ImportError:
        raise UsageError("speech synthesis needs the espeakng-loader package", hint="pip install 'roundelay[speech]'") from None
    return espeakng_loader.get_library_path(), espeakng_loader.get_data_path()


def variants() -> set[str]:
    """Return the installed voice variants. espeak-ng itself ignores an unknown variant silently."""
    return {path.name for path in (Path(_paths()[1]) / "voices" / "!v").iterdir()}


@contextmanager
def _fresh_library() -> Iterator[tuple[Any, int]]:
    """Load the library, yield it and its sample rate, and unload it.

    Raises UsageError if another part of the process keeps the library loaded, because its state would then persist.
    """
    path, data = _paths()
    library = ctypes.CDLL(path)
    try:
        rate = library.espeak_Initialize(SYNCHRONOUS, BUFFER_MS, os.fsencode(data), PHONEME_EVENTS | DO_NOT_EXIT)
        if rate <= 0:
            raise RoundelayError(
                f"espeak_Initialize failed with code {rate}", where=path, hint="pip install --force-reinstall espeakng-loader"
            )
        ctypes.CDLL(None).srand(1)
        yield library, rate
        library.espeak_Terminate()
    finally:
        _ctypes.dlclose(library._handle)
    if _still_loaded(path):
        raise UsageError(
            "espeak-ng is loaded by another part of this process, so its speech would not be reproducible",
            where=path,
            hint="synthesize in a separate process",
        )


def _still_loaded(path: str) -> bool:
    try:
        handle = _ctypes.dlopen(path, os.RTLD_LAZY | os.RTLD_NOLOAD)
    except OSError:
        return False
    _ctypes.dlclose(handle)
    return True


def _set_voice(library: Any, voice: str) -> None:
    if library.espeak_SetVoiceByName(voice.encode()) != 0:
        raise UsageError(
            f"espeak-ng has no voice '{voice}'", hint="'espeak-ng --voices=en' lists accents; en is British English"
        )
    _, plus, variant = voice.partition("+")
    if plus and variant not in variants():
        raise UsageError(f"espeak-ng has no voice variant '{variant}'", hint="'espeak-ng --voices=variant' lists them")


def synthesize_words(words: Sequence[str], voice: str, prosody: Prosody) -> Speech:
    """Synthesize words with a voice such as "en-us+m3". The result depends on the arguments only.

    Raises UsageError for an unknown voice and DataError if espeak-ng produces no sound or no time for a word.
    """
    pieces: list[np.ndarray] = []
    events: list[tuple[int, int, int, str]] = []

    def receive(samples: Any, count: int, reported: Any) -> int:
        if samples and count > 0:
            pieces.append(np.ctypeslib.as_array(samples, (count,)).copy())
        at = 0
        while reported[at].type != END:
            event = reported[at]
            if event.type in (WORD, PHONEME):
                name = event.name.decode("utf-8", errors="replace") if event.type == PHONEME else ""
                events.append((event.type, event.text_position, event.sample, name))
            at += 1
        return 0

    callback = _Callback(receive)
    text = " ".join(words)
    with _fresh_library() as (library, rate):
        _set_voice(library, voice)
        for parameter, value in ((RATE, prosody.rate), (PITCH, prosody.pitch), (RANGE, prosody.range), (WORD_GAP, prosody.gap)):
            if library.espeak_SetParameter(parameter, value, 0) != 0:
                raise UsageError(f"espeak-ng rejects value {value} of parameter {parameter}", where=f"voice {voice}")
        library.espeak_SetSynthCallback(callback)
        encoded = text.encode()
        if library.espeak_Synth(encoded, len(encoded) + 1, 0, TEXT_POSITION_CHARACTERS, 0, UTF8, None, None) != 0:
            raise DataError(f"espeak-ng cannot synthesize '{text}'", where=f"voice {voice}")
        library.espeak_Synchronize()
    samples = np.concatenate(pieces) if pieces else np.zeros(0, np.int16)
    if not samples.any():
        raise DataError(f"espeak-ng produces no sound for '{text}'", where=f"voice {voice}")
    times = _word_times(words, events, len(samples), voice)
    return Speech(samples, rate, [(start / rate, end / rate) for start, end in times])


# ------------------------------------------------------------------------------------------------------- word times


@dataclass
class _Group:
    """Words that espeak-ng reports as one ("in the"), the sample of the report, and their sounds with first samples."""

    words: list[int]
    reported: int
    sounds: list[tuple[str, int]]
    end: int = 0


def _word_times(words: Sequence[str], events: list[tuple[int, int, int, str]], total: int, voice: str) -> list[tuple[int, int]]:
    """Return first sample and end of every word.

    Word events come up to one sound early, so a word begins with the event of its first sound. The event of a stop marks the
    burst, so a word that begins with a stop begins with the closure. After a pause the closure is inaudible and is left out.
    """
    starts = np.cumsum([0] + [len(word) + 1 for word in words[:-1]]) + 1
    groups: list[_Group] = []
    after_pause = {0}
    for type_, position, sample, name in events:
        if type_ == WORD:
            first = int(np.searchsorted(starts, position, side="right")) - 1
            if groups and groups[-1].words[0] == first:
                continue
            groups.append(_Group([first], sample, []))
        elif groups and not name.startswith("_"):
            if groups[-1].end:
                groups[-1].end = 0  # a pause within a word
            groups[-1].sounds.append((name.lstrip("',%=|"), sample))
        elif groups and not groups[-1].end:
            groups[-1].end = sample
            after_pause.add(len(groups))
    times: list[tuple[int, int]] = []
    for number, group in enumerate(groups):
        following = groups[number + 1] if number + 1 < len(groups) else None
        group.words = list(range(group.words[0], following.words[0] if following else len(words)))
        if not group.sounds:
            raise DataError(
                f"espeak-ng produces no sound for '{words[group.words[0]]}'", where=f"voice {voice}: {' '.join(words)}"
            )
    begins = [_begin(group, number in after_pause) for number, group in enumerate(groups)]
    for number, group in enumerate(groups):
        end = min(group.end or total, begins[number + 1] if number + 1 < len(groups) else total)
        cuts = _cuts_within(group, [words[n] for n in group.words], voice)
        bounds = [begins[number], *cuts, end]
        times += pairwise(bounds)
    if len(times) != len(words):
        raise DataError(
            f"espeak-ng reports the times of {len(times)} of {len(words)} words", where=f"voice {voice}: {' '.join(words)}"
        )
    return times


def _begin(group: _Group, after_pause: bool) -> int:
    name, sample = group.sounds[0]
    return min(group.reported, sample) if name in STOPS and not after_pause else sample


def _cuts_within(group: _Group, words: list[str], voice: str) -> list[int]:
    """Return the boundaries of words reported as one: each word but the first has as many sounds as when spoken alone."""
    cuts: list[int] = []
    left = len(group.sounds)
    for word in reversed(words[1:]):
        alone = phonemes([word], voice)[0].count(SEPARATOR) + 1
        left = max(1, left - alone)
        cuts.insert(0, group.sounds[left][1])
    return cuts


# --------------------------------------------------------------------------------------------------- pronunciations


def phonemes(texts: Sequence[str], voice: str) -> list[str]:
    """Return the IPA transcription of each text: sounds separated by "_", words by a space."""
    mode = IPA | (ord(SEPARATOR) << 8)
    transcriptions = []
    with _fresh_library() as (library, _):
        _set_voice(library, voice)
        library.espeak_TextToPhonemes.restype = ctypes.c_char_p
        for text in texts:
            clauses = []
            rest = ctypes.c_char_p(text.encode())
            while rest.value:
                clauses.append((library.espeak_TextToPhonemes(ctypes.byref(rest), UTF8, mode) or b"").decode().strip())
            transcriptions.append(" ".join(clauses))
    return transcriptions
