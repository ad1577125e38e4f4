"""Speed perturbation (Ko et al. 2015): copies of recordings played faster and slower, which also shifts pitch and formants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from roundelay.core.process_map import process_map
from roundelay.errors import UsageError
from roundelay.speech.corpora.utterance import Utterance
from roundelay.speech.features.audio import read_audio, resampled

MIN_FACTOR, MAX_FACTOR = 0.5, 2.0


def perturb_speed(
    utterances: Sequence[Utterance], factors: Sequence[float], folder: Path, rate: int, *, jobs: int = 1, progress: str = "auto"
) -> list[Utterance]:
    """Write a copy of every utterance for each factor as FLAC into `folder` and return the copies.

    A copy gets the prefix "spFACTOR-" in its id and its speaker, as in Kaldi: another speed counts as another speaker. Raises
    UsageError if a factor is 1 or outside 0.5 to 2.
    """
    for factor in factors:
        if not MIN_FACTOR <= factor <= MAX_FACTOR or factor == 1.0:
            raise UsageError(
                f"speed factors must be between {MIN_FACTOR:g} and {MAX_FACTOR:g} and not 1 (got {factor:g})",
                where="speed_perturb",
                hint="give factors such as [0.9, 1.1]",
            )
    folder.mkdir(parents=True, exist_ok=True)
    copies = [(utterance, factor) for factor in factors for utterance in utterances]
    work = partial(_write_copy, folder=folder, rate=rate)
    return list(process_map(work, copies, jobs=jobs, progress=progress, what="speed perturbation"))


def _write_copy(copy: tuple[Utterance, float], folder: Path, rate: int) -> Utterance:
    import soundfile

    utterance, factor = copy
    prefix = f"sp{factor:g}-"
    id, speaker = prefix + utterance.id, prefix + utterance.speaker
    samples = resampled(read_audio(utterance, rate, resample=True), rate * factor, rate)
    audio = folder / f"{id}.flac"
    soundfile.write(audio, samples, rate, format="FLAC", subtype="PCM_16")
    return replace(utterance, id=id, speaker=speaker, audio=audio, start=0.0, end=None, command="")
