"""Cluster files: presets, validation and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roundelay.errors import UsageError
from roundelay.simulate import cluster as clusters
from roundelay.simulate.cluster import from_tree
from roundelay.simulate.memory import check_fit, memory_need
from roundelay.strategies import build


def test_presets_name_the_source_of_every_value() -> None:
    assert {"p100-16", "v100-4x8", "v100-8x8", "v100-128"} <= set(clusters.presets())
    for name in clusters.presets():
        cluster = clusters.load(name)
        assert cluster.name == name
        for key in ("machines", "learner.seconds_per_sample", "link.between.gbit_per_s", "memory.device_gb_per_s"):
            assert cluster.sources[key].split(":")[0] in ("found", "derived", "assumed", "remembered, not confirmed")
    assert clusters.load("v100-8x8").learners == 64
    assert len(set(clusters.load("v100-128").machine_names())) == 32


def test_first_keeps_whole_machines_and_their_stragglers() -> None:
    whole = from_tree(
        {"machines": [{"count": 2, "learners": 3}, {"learners": 4}], "straggler": [{"learner": 7, "factor": 2.0}]}
    )
    assert whole.learners == 10
    part = whole.first(8)
    assert part.machine_names() == ["machine-0"] * 3 + ["machine-1"] * 3 + ["machine-2"] * 2
    assert part.straggler == whole.straggler
    assert whole.first(4).straggler == ()
    with pytest.raises(UsageError, match="between 1 and 10"):
        whole.first(11)


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        ({"link": {"between": {"gbit_per_s": 0}}}, "link.between.gbit_per_s = 0"),
        ({"link": {"between": {"gbit_per_s": -1.0}}}, "nothing would ever arrive"),
        ({"link": {"inside": {"latency_us": -3}}}, "time does not run backwards"),
        ({"link": {"inside": {"duplex": "ful"}}}, "did you mean 'full'"),
        ({"link": {"betwen": {}}}, "did you mean 'between'"),
        ({"learner": {"seconds_per_sample": -0.1}}, "learner.seconds_per_sample = -0.1"),
        ({"learner": {"seconds_per_sample": "fast"}}, "not of type float"),
        ({"learner": {"jitter": {"kind": "gausian"}}}, "did you mean 'gaussian'"),
        ({"learner": {"jitter": {"kind": "heavy_tail", "tail": 1.0}}}, "has no mean"),
        ({"machines": []}, "without machines"),
        ({"machines": [{"count": 0}]}, "at least 1"),
        ({"machines": 4}, "not a list of tables"),
        ({"memory": {"gb_per_s": 0.0}}, "memory.gb_per_s"),
        ({"loader": {"samples_per_s": 0}}, "loader.samples_per_s"),
        ({"straggler": [{"factor": 2.0}]}, "names no learner or machine"),
        ({"straggler": [{"factor": 2.0, "learner": 5}]}, "speaks of learner 5"),
        ({"straggler": [{"learner": 0}]}, "lacks 'factor'"),
        ({"straggler": [{"learner": 0, "factor": 2.0, "from_s": 5.0, "to_s": 1.0}]}, "to_s after from_s"),
        ({"failures": [{"learner": 0, "at_s": -1}]}, "failures.at_s = -1"),
        ({"speed": 3}, "there is no key 'speed'"),
    ],
)
def test_impossible_clusters_are_rejected_with_a_reason(tree: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint.replace("(", r"\(").replace("[", r"\[")):
        from_tree(tree)


def test_unknown_presets_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'v100-8x8'"):
        clusters.load("v100-8x9")
    with pytest.raises(UsageError, match="cannot read"):
        clusters.load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("machines = [")
    with pytest.raises(UsageError, match="not valid TOML"):
        clusters.load(tmp_path / "bad.toml")


def test_a_model_that_does_not_fit_is_rejected() -> None:
    traits = build("adpsgd").traits
    small = from_tree({"machines": [{"learners": 8, "memory_gb": 1.0}], "learner": {"memory_gb": 0.5}})
    check_fit(small, memory_need(10_000_000, traits, learners=8), 10_000_000)
    with pytest.raises(UsageError, match=r"0\.6 GB per learner"):
        check_fit(small, memory_need(50_000_000, traits, learners=8), 50_000_000)
    with pytest.raises(UsageError, match=r"8 x 0\.24 GB of host memory"):
        check_fit(small, memory_need(20_000_000, traits, learners=8), 20_000_000)
