"""Runs of gradients without an exchange, from the `exchange_gaps` of events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


def run_lengths(gaps: Mapping[int, int]) -> Counter[int]:
    """Return the number of runs of gradients without an exchange by their length, for one learner.

    gaps   number of steps by the gradients in a row without an exchange that end with them, as `StepTimer.gaps`

    A run of length n contributes one step to each of the gaps 1 to n, and the exchange after it one step to gap 0. So gaps[n]
    is the number of runs of at least n gradients, and gaps[n] - gaps[n + 1] that of exactly n. Length 0 is an exchange that
    follows another one without a gradient between them that had none. A run that no exchange has ended yet counts, too; then
    one run of length 0 is missing. Counts that no complete record of a learner has, as after a loss of events, give no
    negative numbers.
    """
    lengths: Counter[int] = Counter()
    longer = 0
    for length in sorted(gaps, reverse=True):
        if gaps[length] > longer:
            lengths[length] = gaps[length] - longer
            longer = gaps[length]
    return lengths


def quantile(lengths: Mapping[int, int], share: float) -> int:
    """Return the smallest length that at least this share of the runs does not exceed; 0 without runs."""
    total, at_most = sum(lengths.values()), 0
    for length in sorted(lengths):
        at_most += lengths[length]
        if at_most >= share * total:
            return length
    return 0
