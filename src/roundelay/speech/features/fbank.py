"""Compute log-mel filterbanks as Kaldi does, vectorized over frames, and deltas and cepstra of them.

Frames of 25 ms every 10 ms that lie completely inside the signal (snip_edges), no dither, mean removed, pre-emphasis 0.97,
Povey window, power spectrum, triangular filters, natural logarithm, samples in 16-bit units. The result equals
kaldi-native-fbank with these options, which a test checks. The only difference: energies are floored at 1, below the rounding
noise of 16-bit audio. The floor affects digital silence only, whose logarithm would otherwise dominate the variance of a
speaker.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

FRAME_S = 0.025
SHIFT_S = 0.010
PREEMPHASIS = 0.97
ENERGY_FLOOR = 1.0
BLOCK = 4096
"""Frames computed at a time, to bound the memory of long recordings."""
SMALL_PRODUCT = 200_000
"""Size of a matrix product that BLAS computes in one thread."""
DELTA_WINDOW = 2


def frame_count(samples: int, rate: int) -> int:
    """Return the number of frames in a signal of `samples` samples."""
    length, shift = round(FRAME_S * rate), round(SHIFT_S * rate)
    return 0 if samples < length else 1 + (samples - length) // shift


def log_mel(samples: np.ndarray, rate: int, mels: int = 40, low_hz: float = 64.0, high_hz: float = -200.0) -> np.ndarray:
    """Return log-mel features, float32 [frames, mels], of samples in ±1.

    A `high_hz` of 0 or less is an offset from half the rate, as in Kaldi.
    """
    length, shift = round(FRAME_S * rate), round(SHIFT_S * rate)
    total = frame_count(len(samples), rate)
    window, filters = _window(length), mel_filters(rate, mels, low_hz, high_hz)
    size = 2 * (filters.shape[0])
    features = np.empty((total, mels), np.float32)
    scaled = np.asarray(samples, np.float32) * np.float32(32768)
    for first in range(0, total, BLOCK):
        count = min(BLOCK, total - first)
        part = scaled[first * shift : (first + count - 1) * shift + length]
        frames = np.lib.stride_tricks.sliding_window_view(part, length)[::shift]
        frames = frames - frames.mean(axis=1, keepdims=True)
        emphasized = np.empty_like(frames)
        emphasized[:, 1:] = frames[:, 1:] - np.float32(PREEMPHASIS) * frames[:, :-1]
        emphasized[:, 0] = frames[:, 0] * np.float32(1 - PREEMPHASIS)
        spectrum = np.fft.rfft(emphasized * window, n=size)[:, :-1]
        power = spectrum.real**2 + spectrum.imag**2
        features[first : first + count] = np.log(np.maximum(_filtered(power, filters), np.float32(ENERGY_FLOOR)))
    return features


def _filtered(power: np.ndarray, filters: np.ndarray) -> np.ndarray:
    """Return power @ filters, computed in pieces that BLAS never splits: the last bit must not depend on its threads."""
    rows = max(1, SMALL_PRODUCT // filters.size)
    whole = len(power) // rows * rows
    pieces = power[:whole].reshape(-1, rows, power.shape[1]) @ filters
    return np.concatenate([pieces.reshape(whole, filters.shape[1]), power[whole:] @ filters])


@lru_cache(maxsize=8)
def _window(length: int) -> np.ndarray:
    return ((0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / (length - 1))) ** 0.85).astype(np.float32)


@lru_cache(maxsize=8)
def mel_filters(rate: int, mels: int, low_hz: float, high_hz: float) -> np.ndarray:
    """Return the filters, float32 [half the FFT size, mels]: triangles on the mel scale."""
    size = 1 << (round(FRAME_S * rate) - 1).bit_length()
    corners = _corners(rate, mels, low_hz, high_hz)
    left, center, right = corners[:-2], corners[1:-1], corners[2:]
    at = hz_to_mel(np.arange(size // 2) * rate / size)[:, None]
    weights = np.minimum((at - left) / (center - left), (right - at) / (right - center))
    return np.maximum(weights, 0).astype(np.float32)


def filter_centers(rate: int, mels: int, low_hz: float, high_hz: float) -> np.ndarray:
    """Return the center frequencies of the filters in mels."""
    return _corners(rate, mels, low_hz, high_hz)[1:-1]


def _corners(rate: int, mels: int, low_hz: float, high_hz: float) -> np.ndarray:
    high = high_hz if high_hz > 0 else rate / 2 + high_hz
    return np.linspace(hz_to_mel(low_hz), hz_to_mel(high), mels + 2)


def hz_to_mel(hz: float | np.ndarray) -> np.ndarray:
    return 1127.0 * np.log1p(np.asarray(hz, np.float64) / 700.0)


def mel_to_hz(mel: np.ndarray) -> np.ndarray:
    return 700.0 * np.expm1(mel / 1127.0)


@lru_cache(maxsize=8)
def _delta_taps(order: int) -> np.ndarray:
    slope = np.arange(-DELTA_WINDOW, DELTA_WINDOW + 1) / (2 * sum(n * n for n in range(1, DELTA_WINDOW + 1)))
    taps = np.ones(1)
    for _ in range(order):
        taps = np.convolve(taps, slope)
    return taps.astype(np.float32)


def add_deltas(x: np.ndarray, order: int) -> np.ndarray:
    """Return x and its deltas up to `order`, [T, (order + 1) * dim], with the first and last frame repeated, as in Kaldi."""
    reach = DELTA_WINDOW * order
    return (
        context_deltas(np.pad(x, ((reach, reach), (0, 0)), mode="edge"), order)
        if len(x)
        else np.zeros((0, x.shape[1] * (order + 1)), np.float32)
    )


def context_deltas(padded: np.ndarray, order: int) -> np.ndarray:
    """Return x and its deltas, where `padded` already has 2 * order more frames than x on both sides."""
    reach = DELTA_WINDOW * order
    total, dim = len(padded) - 2 * reach, padded.shape[1]
    result = np.empty((total, (order + 1) * dim), np.float32)
    for k in range(order + 1):
        taps = _delta_taps(k)
        first = reach - len(taps) // 2
        column = result[:, k * dim : (k + 1) * dim]
        column[:] = taps[0] * padded[first : first + total]
        for n, tap in enumerate(taps[1:], 1):
            if tap:
                column += tap * padded[first + n : first + n + total]
    return result


@lru_cache(maxsize=8)
def _dct(mels: int, keep: int) -> np.ndarray:
    k, n = np.arange(keep)[None, :], np.arange(mels)[:, None]
    basis = np.sqrt(2.0 / mels) * np.cos(np.pi * k * (n + 0.5) / mels)
    basis[:, 0] /= np.sqrt(2.0)
    return basis.astype(np.float32)


def cepstra(static: np.ndarray, keep: int = 13, deltas: int = 2) -> np.ndarray:
    """Return the first `keep` cepstra of log-mel features with deltas, float32 [T, keep * (deltas + 1)].

    Cepstra are nearly uncorrelated, as diagonal Gaussians assume.
    """
    return add_deltas(static @ _dct(static.shape[1], keep), deltas)
