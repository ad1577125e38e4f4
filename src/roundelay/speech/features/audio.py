"""One utterance's samples: read, cut, checked. The only place that opens audio files."""

from __future__ import annotations

import io
import subprocess
from typing import TYPE_CHECKING, Any

import numpy as np

from roundelay.errors import DataError, UsageError
from roundelay.speech import memory_guard

if TYPE_CHECKING:
    from roundelay.speech.corpora.data_dir import Utterance

SLACK_S = 0.05
"""A segment may end this much after its recording, as times in `segments` are rounded; Kaldi allows half a second."""
BYTES_PER_SAMPLE = 12
"""As read, at another rate, and scaled for the filters: three float32."""


def read_audio(utterance: Utterance, rate: int, *, resample: bool = False, longest_s: float = float("inf")) -> np.ndarray:
    """The samples, float32 in ±1, one channel, at `rate` per second.

    Another rate is an error unless `resample` is set. `longest_s` and the memory at hand are looked at before anything is
    read, so that a broken segment list cannot fill the memory.
    """
    import soundfile

    where = f"utterance {utterance.id}, file {utterance.audio}"
    source = io.BytesIO(_run(utterance, where)) if utterance.command else utterance.audio
    try:
        with soundfile.SoundFile(source) as opened:
            samples, found = _cut(opened, utterance, where, longest_s), opened.samplerate
            if found != rate and not resample:
                raise DataError(
                    f"the audio has {found} samples per second, not {rate}",
                    where=where,
                    hint=f"set rate to {found}, or allow resampling",
                )
    except (soundfile.LibsndfileError, OSError) as error:
        raise DataError(
            f"the audio cannot be read: {_reason(error)}", where=where, hint="replace the file, or take the utterance out"
        ) from None
    if not np.isfinite(samples).all():
        raise DataError("the audio holds samples that are not numbers", where=where, hint="replace the file")
    return samples if found == rate else resampled(samples, found, rate)


def _cut(opened: Any, utterance: Utterance, where: str, longest_s: float) -> np.ndarray:
    found = opened.samplerate
    if opened.channels != 1:
        raise DataError(
            f"the audio has {opened.channels} channels",
            where=where,
            hint="write one file per channel (sox in.wav out.wav remix 1)",
        )
    first = round(utterance.start * found)
    last = opened.frames if utterance.end is None else round(utterance.end * found)
    if last > opened.frames + SLACK_S * found or first >= max(opened.frames, 1):
        raise DataError(
            f"the segment {utterance.start} s to {last / found:.3f} s leaves its recording of {opened.frames / found:.3f} s",
            where=where,
            hint="mend the times in segments",
        )
    last = min(last, opened.frames)
    if last <= first:
        raise DataError("the audio is empty", where=where, hint="replace the file, or take the utterance out")
    if last - first > longest_s * found:
        raise DataError(
            f"the utterance lasts {(last - first) / found:.1f} s, longer than the {longest_s:g} s allowed",
            where=where,
            hint="cut it into segments, or raise longest_s (in a recipe: features.longest_s)",
        )
    memory_guard.require(BYTES_PER_SAMPLE * (last - first), f"an utterance of {(last - first) / found:.0f} s", where)
    opened.seek(first)
    samples = opened.read(last - first, dtype="float32")
    if len(samples) < last - first:
        raise DataError(
            f"the audio ends after {first + len(samples)} samples of {opened.frames}: it was cut off",
            where=where,
            hint="replace the file, or take the utterance out",
        )
    return samples


def _run(utterance: Utterance, where: str) -> bytes:
    done = subprocess.run(utterance.command, shell=True, stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise DataError(f"the command of its recording failed ({done.returncode}): {' '.join(said)}", where=where)
    return done.stdout


def _reason(error: Exception) -> str:
    return str(getattr(error, "error_string", error)).strip().rstrip(".")


def resampled(samples: np.ndarray, found: float, rate: float) -> np.ndarray:
    """From `found` samples per second to `rate`."""
    try:
        import soxr
    except ImportError:
        raise UsageError("resampling needs the soxr package", hint="pip install 'roundelay[asr]'") from None
    return np.asarray(soxr.resample(samples, found, rate), np.float32)
