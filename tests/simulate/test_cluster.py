"""Clusters from files: what they say, and what cannot be."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from roundelay.errors import UsageError
from roundelay.simulate import cluster as clusters
from roundelay.simulate.cluster import from_tree
from roundelay.simulate.memory import check_fit, memory_need
from roundelay.strategies import build


def test_presets_say_where_every_figure_comes_from() -> None:
    assert {"p100-16", "v100-4x8", "v100-8x8", "v100-128"} <= set(clusters.presets())
    for name in clusters.presets():
        cluster = clusters.load(name)
        assert cluster.name == name
        for figure in ("machines", "learner.seconds_per_sample", "link.between.gbit_per_s", "memory.device_gb_per_s"):
            assert cluster.sources[figure].split(":")[0] in ("found", "derived", "assumed", "remembered, not confirmed")
    assert clusters.load("v100-8x8").learners == 64
    assert len(set(clusters.load("v100-128").machine_names())) == 32


def test_a_cluster_is_cut_machine_by_machine() -> None:
    machines = [{"count": 2, "learners": 3}, {"learners": 4}]
    whole = from_tree({"machines": machines, "straggler": [{"learner": 7, "factor": 2.0}]})
    assert whole.learners == 10
    part = whole.first(8)
    assert part.machine_names() == ["machine-0"] * 3 + ["machine-1"] * 3 + ["machine-2"] * 2
    assert part.straggler == whole.straggler
    assert whole.first(4).straggler == ()
    with pytest.raises(UsageError, match="learners must be 1 to 10"):
        whole.first(11)


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        ({"link": {"between": {"gbit_per_s": 0}}}, "[link.between] gbit_per_s must be > 0 (got 0)"),
        ({"link": {"between": {"gbit_per_s": -1.0}}}, "gbit_per_s must be > 0 (got -1)"),
        ({"link": {"inside": {"latency_us": -3}}}, "[link.inside] latency_us must be >= 0 (got -3)"),
        ({"link": {"inside": {"duplex": "ful"}}}, "did you mean 'full'"),
        ({"link": {"betwen": {}}}, "did you mean 'between'"),
        ({"learner": {"seconds_per_sample": -0.1}}, "[learner] seconds_per_sample must be >= 0 (got -0.1)"),
        ({"learner": {"seconds_per_sample": "fast"}}, "seconds_per_sample must be a number"),
        ({"learner": {"jitter": {"kind": "gausian"}}}, "did you mean 'gaussian'"),
        ({"learner": {"jitter": {"kind": "heavy_tail", "tail": 1.0}}}, "tail must be > 1"),
        ({"machines": []}, "[[machines]] must not be empty"),
        ({"machines": [{"count": 0}]}, "[machines] count must be >= 1 (got 0)"),
        ({"machines": 4}, "machines must be a list of sections"),
        ({"memory": {"gb_per_s": 0.0}}, "[memory] gb_per_s must be > 0"),
        ({"loader": {"samples_per_s": 0}}, "[loader] samples_per_s must be > 0"),
        ({"straggler": [{"factor": 2.0}]}, "must set either learner or machine"),
        ({"straggler": [{"factor": 2.0, "learner": 5}]}, "learner must be < 1 (got 5)"),
        ({"straggler": [{"learner": 0}]}, "missing key 'factor' in [straggler]"),
        ({"straggler": [{"learner": 0, "factor": 2.0, "from_s": 5.0, "to_s": 1.0}]}, "to_s must be > from_s"),
        ({"failures": [{"learner": 0, "at_s": -1}]}, "[failures] at_s must be >= 0 (got -1)"),
        ({"speed": 3}, "unknown key 'speed'"),
    ],
)
def test_impossible_clusters_are_refused_with_a_reason(tree: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(complaint)):
        from_tree(tree)


def test_unknown_presets_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'v100-8x8'"):
        clusters.load("v100-8x9")
    with pytest.raises(UsageError, match="cannot read"):
        clusters.load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("machines = [")
    with pytest.raises(UsageError, match="not valid TOML"):
        clusters.load(tmp_path / "bad.toml")


def test_more_than_fits_is_refused() -> None:
    traits = build("adpsgd").traits
    small = from_tree({"machines": [{"learners": 8, "memory_gb": 1.0}], "learner": {"memory_gb": 0.5}})
    check_fit(small, memory_need(10_000_000, traits, learners=8), 10_000_000)
    with pytest.raises(UsageError, match=r"0\.6 GB per learner"):
        check_fit(small, memory_need(50_000_000, traits, learners=8), 50_000_000)
    with pytest.raises(UsageError, match=r"8 x 0\.24 GB of host memory"):
        check_fit(small, memory_need(20_000_000, traits, learners=8), 20_000_000)
