"""Recordings played faster and slower (pitch and formants move along), to have more of them to train on: Ko et al. 2015."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from roundelay.core.process_map import process_map
from roundelay.errors import UsageError
from roundelay.speech.corpora.data_dir import Utterance
from roundelay.speech.features.audio import read_audio, resampled

SLOWEST, FASTEST = 0.5, 2.0


def at_other_speeds(
    utterances: Sequence[Utterance], speeds: Sequence[float], folder: Path, rate: int, *, jobs: int = 1, progress: str = "auto"
) -> list[Utterance]:
    """A copy of every utterance for each speed, as new speakers: a voice at another speed is another voice."""
    for speed in speeds:
        if not SLOWEST <= speed <= FASTEST or speed == 1.0:
            raise UsageError(f"speed {speed:g} is no use", where="speeds", hint=f"give {SLOWEST:g} to {FASTEST:g}, without 1")
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [(utterance, speed) for speed in speeds for utterance in utterances]
    return list(
        process_map(partial(_play, folder=folder, rate=rate), wanted, jobs=jobs, progress=progress, what="other speeds")
    )


def _play(order: tuple[Utterance, float], folder: Path, rate: int) -> Utterance:
    import soundfile

    utterance, speed = order
    name = f"sp{speed:g}-{utterance.id}"
    samples = resampled(read_audio(utterance, rate, resample=True), rate * speed, rate)
    audio = folder / f"{name}.flac"
    soundfile.write(audio, samples, rate, format="FLAC", subtype="PCM_16")
    return replace(utterance, id=name, speaker=f"sp{speed:g}-{utterance.speaker}", audio=audio, start=0.0, end=None, command="")
