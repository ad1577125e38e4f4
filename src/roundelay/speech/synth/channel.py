"""Distort synthesized speech: vocal tract, room, transmission line, noise.

Every random choice is drawn from the generator passed in. The filters have no delay, so word times stay valid.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roundelay.errors import UsageError

TELEPHONE = 8000
"""At this rate the line is a telephone line: 300 to 3400 Hz and μ-law."""
NOISES = ("white", "pink", "car", "babble")
FFT_BLOCK = 2048


@dataclass(frozen=True)
class TransmittedAudio:
    """Audio after the channel: `samples` in ±1, the sum of `speech` and `noise`. Words begin `lead_s` later than before."""

    samples: np.ndarray
    speech: np.ndarray
    noise: np.ndarray
    snr_db: float
    lead_s: float
    kind: str


def warp_vocal_tract(samples: np.ndarray, source_rate: int, rate: int, warp: float) -> np.ndarray:
    """Resample int16 samples to `rate`, with all resonances, pitch and tempo multiplied by `warp`.

    A factor above 1 corresponds to a shorter vocal tract. Raises UsageError without soxr.
    """
    try:
        import soxr
    except ImportError:
        raise UsageError("speech synthesis needs the soxr package", hint="pip install soxr") from None
    return np.asarray(soxr.resample(samples.astype(np.float32) / 32768, source_rate * warp, rate, quality="MQ"), np.float32)


def transmit(
    speech: np.ndarray,
    active: tuple[float, float],
    rate: int,
    rng: np.random.Generator,
    snr_db: tuple[float, float],
    babble: np.ndarray,
    reverb_share: float = 0.6,
) -> TransmittedAudio:
    """Pass speech through a room and a line with noise.

    The signal-to-noise ratio is drawn uniformly from `snr_db`. It relates the speech between the `active` seconds (first to
    last word) to the noise, both after the line. `babble` is the signal for noise of that kind.
    """
    lead, tail = (int(rate * rng.uniform(0.10, 0.35)) for _ in range(2))
    total = lead + len(speech) + tail
    size = -(-(total + rate // 2) // FFT_BLOCK) * FFT_BLOCK
    line = _line(size, rate, rng)
    response = line * _tilt(size, rate, rng)
    if rng.random() < reverb_share:
        response = response * np.fft.rfft(_room(rate, rng), size)
    padded = np.zeros(size, np.float32)
    padded[lead : lead + len(speech)] = speech
    clean = np.fft.irfft(np.fft.rfft(padded) * response, size)[:total].astype(np.float32)
    kind = NOISES[int(rng.integers(len(NOISES)))]
    noise = np.fft.irfft(np.fft.rfft(_noise(kind, size, rate, rng, babble)) * line, size)[:total].astype(np.float32)
    snr = float(rng.uniform(*snr_db))
    first, last = lead + int(active[0] * rate), lead + int(active[1] * rate)
    speech_power = float(np.mean(np.square(clean[first:last]))) + 1e-12
    noise *= np.sqrt(speech_power / (float(np.mean(np.square(noise))) + 1e-12) / 10 ** (snr / 10))
    level = 10 ** (rng.uniform(-32, -20) / 20) / np.sqrt(speech_power)
    loudest = float(np.abs(clean + noise).max()) * level
    level *= min(1.0, 0.95 / loudest)
    mixed = (clean + noise) * np.float32(level)
    if rate == TELEPHONE:
        mixed = _mu_law(mixed)
    return TransmittedAudio(mixed, clean * np.float32(level), noise * np.float32(level), snr, lead / rate, kind)


def _line(size: int, rate: int, rng: np.random.Generator) -> np.ndarray:
    """Return the gain of the line: a band with soft edges."""
    f = np.fft.rfftfreq(size, 1 / rate)
    low = rng.uniform(200, 350) if rate == TELEPHONE else rng.uniform(50, 100)
    gain = 1 / np.sqrt(1 + (low / np.maximum(f, 1.0)) ** 6)
    if rate == TELEPHONE:
        gain = gain / np.sqrt(1 + (f / rng.uniform(3300, 3700)) ** 24)
    return gain.astype(np.float32)


def _tilt(size: int, rate: int, rng: np.random.Generator) -> np.ndarray:
    """Return the gain of microphone and mouth: a slope of up to ±6 dB over the band and two broad peaks."""
    x = np.linspace(0, 1, size // 2 + 1)
    decibel = rng.uniform(-6, 6) * (x - 0.5)
    for _ in range(2):
        decibel += rng.uniform(-4, 4) * np.exp(-0.5 * ((x - rng.uniform(0, 1)) / rng.uniform(0.08, 0.25)) ** 2)
    return (10 ** (decibel / 20)).astype(np.float32)


def _room(rate: int, rng: np.random.Generator) -> np.ndarray:
    """Return a room impulse response: direct sound, and from 3 ms on decaying noise that is 3 to 15 dB weaker in total."""
    seconds = rng.uniform(0.15, 0.45)
    t = np.arange(int(rate * seconds)) / rate
    echoes = rng.standard_normal(len(t), dtype=np.float32) * np.exp(-6.9 * t / seconds)
    echoes[: int(0.003 * rate)] = 0
    echoes *= np.sqrt(10 ** (-rng.uniform(3, 15) / 10) / np.sum(np.square(echoes)))
    echoes[0] = 1
    return echoes


def _noise(kind: str, size: int, rate: int, rng: np.random.Generator, babble: np.ndarray) -> np.ndarray:
    """Return `size` samples of noise of a kind in NOISES."""
    if kind == "babble":
        first = int(rng.integers(len(babble)))
        return np.take(babble, np.arange(first, first + size), mode="wrap")
    white = rng.standard_normal(size, dtype=np.float32)
    if kind == "white":
        return white
    f = np.maximum(np.fft.rfftfreq(size, 1 / rate), 30.0)
    gain = f**-0.5 if kind == "pink" else 1 / (1 + (f / 250) ** 2) + 0.02
    return np.fft.irfft(np.fft.rfft(white) * gain.astype(np.float32), size).astype(np.float32)


def _mu_law(x: np.ndarray, mu: float = 255.0) -> np.ndarray:
    """Encode to 8-bit μ-law and decode."""
    code = np.rint(np.sign(x) * np.log1p(mu * np.abs(x)) / np.log1p(mu) * 127) / 127
    return (np.sign(code) * np.expm1(np.abs(code) * np.log1p(mu)) / mu).astype(np.float32)
