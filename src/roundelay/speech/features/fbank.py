"""Log-mel filterbanks as Kaldi computes them, vectorised over frames; deltas and cepstra.

25 ms frames every 10 ms that lie wholly inside the signal (snip_edges), no dither, mean removed, pre-emphasis 0.97, Povey
window, power spectrum, triangular filters, natural logarithm; samples count in 16-bit units. Equal to kaldi-native-fbank with
these options (a test holds them together), except that energies are floored at 1: below the rounding noise of 16-bit audio,
so only digital silence feels it, whose logarithm would otherwise dominate a speaker's variance.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

FRAME_S = 0.025
SHIFT_S = 0.010
PREEMPHASIS = 0.97
ENERGY_FLOOR = 1.0
BLOCK = 4096
"""Frames computed at a time: bounds the memory of long recordings."""
SMALL_PRODUCT = 200_000
DELTA_WINDOW = 2


def frame_count(samples: int, rate: int) -> int:
    length, shift = round(FRAME_S * rate), round(SHIFT_S * rate)
    return 0 if samples < length else 1 + (samples - length) // shift


def log_mel(samples: np.ndarray, rate: int, mels: int = 40, low_hz: float = 64.0, high_hz: float = -200.0) -> np.ndarray:
    """float32 [frames, mels] of samples in ±1. A `high_hz` of zero or less counts from half the rate, as in Kaldi."""
    length, shift = round(FRAME_S * rate), round(SHIFT_S * rate)
    total = frame_count(len(samples), rate)
    window, filters = _window(length), mel_filters(rate, mels, low_hz, high_hz)
    size = 2 * (filters.shape[0])
    found = np.empty((total, mels), np.float32)
    scaled = np.asarray(samples, np.float32) * np.float32(32768)
    for first in range(0, total, BLOCK):
        count = min(BLOCK, total - first)
        part = scaled[first * shift : (first + count - 1) * shift + length]
        frames = np.lib.stride_tricks.sliding_window_view(part, length)[::shift]
        frames = frames - frames.mean(axis=1, keepdims=True)
        emphasised = np.empty_like(frames)
        emphasised[:, 1:] = frames[:, 1:] - np.float32(PREEMPHASIS) * frames[:, :-1]
        emphasised[:, 0] = frames[:, 0] * np.float32(1 - PREEMPHASIS)
        spectrum = np.fft.rfft(emphasised * window, n=size)[:, :-1]
        power = spectrum.real**2 + spectrum.imag**2
        found[first : first + count] = np.log(np.maximum(_filtered(power, filters), np.float32(ENERGY_FLOOR)))
    return found


def _filtered(power: np.ndarray, filters: np.ndarray) -> np.ndarray:
    """power @ filters in pieces so small that BLAS never shares them out: the last bit must not depend on its threads."""
    rows = max(1, SMALL_PRODUCT // filters.size)
    whole = len(power) // rows * rows
    pieces = power[:whole].reshape(-1, rows, power.shape[1]) @ filters
    return np.concatenate([pieces.reshape(whole, filters.shape[1]), power[whole:] @ filters])


@lru_cache(maxsize=8)
def _window(length: int) -> np.ndarray:
    return ((0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / (length - 1))) ** 0.85).astype(np.float32)


@lru_cache(maxsize=8)
def mel_filters(rate: int, mels: int, low_hz: float, high_hz: float) -> np.ndarray:
    """float32 [half the FFT, mels]: triangles that are straight lines on the mel scale."""
    size = 1 << (round(FRAME_S * rate) - 1).bit_length()
    corners = _corners(rate, mels, low_hz, high_hz)
    left, centre, right = corners[:-2], corners[1:-1], corners[2:]
    at = mel_of(np.arange(size // 2) * rate / size)[:, None]
    weights = np.minimum((at - left) / (centre - left), (right - at) / (right - centre))
    return np.maximum(weights, 0).astype(np.float32)


def filter_centres(rate: int, mels: int, low_hz: float, high_hz: float) -> np.ndarray:
    """Where the filters stand, in mels."""
    return _corners(rate, mels, low_hz, high_hz)[1:-1]


def _corners(rate: int, mels: int, low_hz: float, high_hz: float) -> np.ndarray:
    high = high_hz if high_hz > 0 else rate / 2 + high_hz
    return np.linspace(mel_of(low_hz), mel_of(high), mels + 2)


def mel_of(hz: float | np.ndarray) -> np.ndarray:
    return 1127.0 * np.log1p(np.asarray(hz, np.float64) / 700.0)


def hz_of(mel: np.ndarray) -> np.ndarray:
    return 700.0 * np.expm1(mel / 1127.0)


@lru_cache(maxsize=8)
def _delta_taps(order: int) -> np.ndarray:
    slope = np.arange(-DELTA_WINDOW, DELTA_WINDOW + 1) / (2 * sum(n * n for n in range(1, DELTA_WINDOW + 1)))
    taps = np.ones(1)
    for _ in range(order):
        taps = np.convolve(taps, slope)
    return taps.astype(np.float32)


def add_deltas(x: np.ndarray, order: int) -> np.ndarray:
    """[T, (order + 1) * dim]: x, its slope over ±2 frames, the slope of that, ... with the ends repeated, as in Kaldi."""
    reach = DELTA_WINDOW * order
    return (
        context_deltas(np.pad(x, ((reach, reach), (0, 0)), mode="edge"), order)
        if len(x)
        else np.zeros((0, x.shape[1] * (order + 1)), np.float32)
    )


def context_deltas(padded: np.ndarray, order: int) -> np.ndarray:
    """The same of an x that already has 2 * order frames more on both sides."""
    reach = DELTA_WINDOW * order
    total, dim = len(padded) - 2 * reach, padded.shape[1]
    found = np.empty((total, (order + 1) * dim), np.float32)
    for k in range(order + 1):
        taps = _delta_taps(k)
        first = reach - len(taps) // 2
        column = found[:, k * dim : (k + 1) * dim]
        column[:] = taps[0] * padded[first : first + total]
        for n, tap in enumerate(taps[1:], 1):
            if tap:
                column += tap * padded[first + n : first + n + total]
    return found


@lru_cache(maxsize=8)
def _dct(mels: int, keep: int) -> np.ndarray:
    k, n = np.arange(keep)[None, :], np.arange(mels)[:, None]
    basis = np.sqrt(2.0 / mels) * np.cos(np.pi * k * (n + 0.5) / mels)
    basis[:, 0] /= np.sqrt(2.0)
    return basis.astype(np.float32)


def cepstra(static: np.ndarray, keep: int = 13, deltas: int = 2) -> np.ndarray:
    """float32 [T, keep * (deltas + 1)]: the cosine transform of log-mels, nearly uncorrelated as diagonal Gaussians want it."""
    return add_deltas(static @ _dct(static.shape[1], keep), deltas)
