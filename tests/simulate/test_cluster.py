"""Clusters from files: what they say, and what cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roundelay.errors import UsageError
from roundelay.simulate import cluster as clusters
from roundelay.simulate.cluster import from_tree
from roundelay.simulate.memory import check_fit, need
from roundelay.strategies import build


def test_presets_say_where_every_figure_comes_from() -> None:
    assert {"p100-16", "v100-4x8", "v100-8x8", "v100-128"} <= set(clusters.presets())
    for name in clusters.presets():
        made = clusters.load(name)
        assert made.name == name
        for figure in ("machines", "learner.seconds_per_sample", "link.between.gbit_per_s", "memory.device_gb_per_s"):
            assert made.sources[figure].split(":")[0] in ("found", "derived", "assumed", "remembered, not confirmed")
    assert clusters.load("v100-8x8").learners == 64
    assert len(set(clusters.load("v100-128").machine_names())) == 32


def test_a_cluster_is_cut_machine_by_machine() -> None:
    whole = from_tree({"machines": [{"count": 2, "learners": 3}, {"learners": 4}], "slow": [{"learner": 7, "factor": 2.0}]})
    assert whole.learners == 10
    part = whole.cut(8)
    assert part.machine_names() == ["machine-0"] * 3 + ["machine-1"] * 3 + ["machine-2"] * 2
    assert part.slow == whole.slow
    assert whole.cut(4).slow == ()
    with pytest.raises(UsageError, match="11 learners on a cluster that has 10"):
        whole.cut(11)


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
        ({"slow": [{"factor": 2.0}]}, "names no learner or machine"),
        ({"slow": [{"factor": 2.0, "learner": 5}]}, "speaks of learner 5"),
        ({"slow": [{"learner": 0}]}, "lacks 'factor'"),
        ({"slow": [{"learner": 0, "factor": 2.0, "from_s": 5.0, "to_s": 1.0}]}, "to_s after from_s"),
        ({"failures": [{"learner": 0, "at_s": -1}]}, "failures.at_s = -1"),
        ({"speed": 3}, "there is no key 'speed'"),
    ],
)
def test_impossible_clusters_are_refused_with_a_reason(tree: dict[str, Any], complaint: str) -> None:
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


def test_more_than_fits_is_refused() -> None:
    traits = build("adpsgd").traits
    small = from_tree({"machines": [{"learners": 8, "memory_gb": 1.0}], "learner": {"memory_gb": 0.5}})
    check_fit(small, need(10_000_000, traits, learners=8), 10_000_000)
    with pytest.raises(UsageError, match=r"0\.6 GB per learner"):
        check_fit(small, need(50_000_000, traits, learners=8), 50_000_000)
    with pytest.raises(UsageError, match=r"8 x 0\.24 GB of host memory"):
        check_fit(small, need(20_000_000, traits, learners=8), 20_000_000)
