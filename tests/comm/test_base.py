"""Reductions in rank order: one formula, the same bits on every backend."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from roundelay.comm.base import SlicedMean, plain_sum, weighted_mean, weighted_sum


@given(st.integers(1, 5), st.integers(1, 20), st.booleans(), st.integers(0, 1000))
def test_the_sliced_mean_has_the_bits_of_the_weighted_mean(size: int, numel: int, weighted: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    xs = [torch.randn(numel, generator=generator) for _ in range(size)]
    weights = [float(r + 1) if weighted else None for r in range(size)]
    means = [SlicedMean(x, weight, rank, size) for rank, (x, weight) in enumerate(zip(xs, weights, strict=True))]
    total = torch.stack([m.weights for m in means]).sum(0) if weighted else torch.ones(size, dtype=torch.float64)
    for rank, mean in enumerate(means):  # what all-to-all and all-reduce do
        mean.incoming.copy_(torch.cat([m.outgoing.view(size, -1)[rank] for m in means]))
        mean.weights.copy_(total)
    slices = torch.cat([mean.own_slice() for mean in means])
    expected = weighted_mean(dict(enumerate(zip(xs, weights, strict=True))))
    assert all(torch.equal(mean.result(slices), expected) for mean in means)


def test_sums_are_in_rank_order() -> None:
    big, small = torch.tensor([1e8]), torch.tensor([1.0])
    inputs = {2: -big, 0: big, 1: small}
    assert float(plain_sum(inputs)) == float(big + small - big)
    assert float(weighted_sum({1: small, 0: big}, {1: 0.5, 0: 0.25})) == 0.25e8
    out = torch.empty(1)
    assert weighted_sum(inputs, {0: 1.0, 1: 1.0}, out=out) is out
