"""Read and check the samples of utterances. Only this module opens audio files."""

from __future__ import annotations

import io
import subprocess
from typing import TYPE_CHECKING, Any

import numpy as np

from roundelay.errors import PARSE_ERRORS, DataError, UsageError
from roundelay.speech import memory_guard

if TYPE_CHECKING:
    from roundelay.speech.corpora.utterance import Utterance

SLACK_S = 0.05
"""A segment may end this long after its recording, because times in `segments` are rounded. Kaldi allows 0.5 s."""
BYTES_PER_SAMPLE = 12
"""Three float32 copies: as read, resampled, and scaled for the filters."""


def read_audio(utterance: Utterance, rate: int, *, resample: bool = False, longest_s: float = float("inf")) -> np.ndarray:
    """Return the samples of an utterance: float32 in ±1, one channel, `rate` samples per second.

    The duration is compared with `longest_s` and the free memory before anything is read, so a wrong segment list cannot
    exhaust memory. Raises DataError if the audio is unreadable, empty, too long, has several channels, or has another rate and
    `resample` is not set.
    """
    import soundfile

    where = f"utterance {utterance.id}, file {utterance.audio}"
    source = io.BytesIO(_command_output(utterance, where)) if utterance.command else utterance.audio
    try:
        with soundfile.SoundFile(source) as file:
            samples, source_rate = _segment(file, utterance, where, longest_s), file.samplerate
            if source_rate != rate and not resample:
                raise DataError(
                    f"the audio must have {rate} samples per second (got {source_rate})",
                    where=where,
                    hint=f"set rate to {source_rate}, or allow resampling",
                )
    except (soundfile.LibsndfileError, *PARSE_ERRORS) as error:
        raise DataError(
            f"the audio cannot be read: {_reason(error)}", where=where, hint="replace the file, or remove the utterance"
        ) from None
    if not np.isfinite(samples).all():
        raise DataError("the audio contains samples that are not finite", where=where, hint="replace the file")
    return samples if source_rate == rate else resampled(samples, source_rate, rate)


def _segment(file: Any, utterance: Utterance, where: str, longest_s: float) -> np.ndarray:
    """Return the samples of the utterance's segment of an open sound file."""
    rate = file.samplerate
    if file.channels != 1:
        raise DataError(
            f"the audio must have 1 channel (got {file.channels})",
            where=where,
            hint="write one file per channel (sox in.wav out.wav remix 1)",
        )
    if not 0 <= utterance.start < float("inf") or not (utterance.end is None or 0 <= utterance.end < float("inf")):
        raise DataError(
            f"the times of the segment must be numbers >= 0 (got {utterance.start} s to {utterance.end} s)",
            where=where,
            hint="correct the times in segments",
        )
    first = round(utterance.start * rate)
    last = file.frames if utterance.end is None else round(utterance.end * rate)
    if last > file.frames + SLACK_S * rate or first >= max(file.frames, 1):
        raise DataError(
            f"the segment {utterance.start} s to {last / rate:.3f} s exceeds its recording of {file.frames / rate:.3f} s",
            where=where,
            hint="correct the times in segments",
        )
    last = min(last, file.frames)
    if last <= first:
        raise DataError("the audio is empty", where=where, hint="replace the file, or remove the utterance")
    if last - first > longest_s * rate:
        raise DataError(
            f"the utterance lasts {(last - first) / rate:.1f} s, longer than the {longest_s:g} s allowed",
            where=where,
            hint="cut it into segments, or raise longest_s (in a recipe: features.longest_s)",
        )
    memory_guard.require(BYTES_PER_SAMPLE * (last - first), f"an utterance of {(last - first) / rate:.0f} s", where)
    file.seek(first)
    samples = file.read(last - first, dtype="float32")
    if len(samples) < last - first:
        raise DataError(
            f"the audio is truncated: it ends after {first + len(samples)} of {file.frames} samples",
            where=where,
            hint="replace the file, or remove the utterance",
        )
    return samples


def _command_output(utterance: Utterance, where: str) -> bytes:
    process = subprocess.run(utterance.command, shell=True, stdin=subprocess.DEVNULL, capture_output=True)
    if process.returncode != 0:
        last_line = process.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise DataError(
            f"the command of the recording failed with exit code {process.returncode}: {' '.join(last_line)}", where=where
        )
    return process.stdout


def _reason(error: Exception) -> str:
    return str(getattr(error, "error_string", error)).strip().rstrip(".")


def resampled(samples: np.ndarray, source_rate: float, rate: float) -> np.ndarray:
    """Return the samples converted from `source_rate` to `rate` samples per second. Raises UsageError without soxr."""
    try:
        import soxr
    except ImportError:
        raise UsageError("resampling needs the soxr package", hint="pip install soxr") from None
    return np.asarray(soxr.resample(samples, source_rate, rate), np.float32)
