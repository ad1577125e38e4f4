"""Simulated durations compared with durations computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from roundelay.errors import PeerLost
from roundelay.simulate.cluster import Cluster, from_tree
from roundelay.simulate.run import SimulationResult, simulate_timing

PARAMETERS = 25_000_000  # 100 MB: 0.8 s at 1 Gbit/s


def cluster(machines: int = 4, learners: int = 1, **rest: Any) -> Cluster:
    tree: dict[str, Any] = {
        "machines": [{"count": machines, "learners": learners}],
        "learner": {"seconds_per_sample": 0.01, "backward_share": 0.0},
        "link": {"between": {"gbit_per_s": 1.0}, "inside": {"gbit_per_s": 80.0, "shared": False}},
    }
    return from_tree({**tree, **rest})


def run(on: Cluster, strategy: str, **options: Any) -> SimulationResult:
    settings: dict[str, Any] = {"parameters": PARAMETERS, "batch": 100, "steps": 20, "momentum": 0.0, **options}
    return simulate_timing(on, strategy=strategy, **settings)


def test_sync_takes_the_gradient_and_a_ring_of_bytes() -> None:
    step = 1.0 + 2 * 3 / 4 * 0.8
    assert run(cluster(), "sync").samples_per_s == pytest.approx(
        400 / step, rel=0.06
    )  # the sum of the last step is not counted


def test_buckets_overlap_with_the_backward_pass() -> None:
    learner = {"seconds_per_sample": 0.02, "backward_share": 0.7}  # 2 s, of which 1.4 s backward; the ring takes 1.2 s
    hidden = run(cluster(learner=learner), "sync")
    assert hidden.efficiency > 0.9


def test_delay_by_one_overlaps_communication_with_the_gradient() -> None:
    assert run(cluster(), "delay_by_one").samples_per_s == pytest.approx(400 / 1.2, rel=0.06)  # the ring is longer
    fast = cluster(link={"between": {"gbit_per_s": 10.0}})
    assert run(fast, "delay_by_one").efficiency > 0.99
    assert run(fast, "sync").efficiency == pytest.approx(1 / 1.12, rel=0.02)


def test_half_duplex_takes_twice_as_long() -> None:
    half = cluster(link={"between": {"gbit_per_s": 1.0, "duplex": "half"}})
    step = 1.0 + 2 * 1.2
    assert run(half, "sync").samples_per_s == pytest.approx(400 / step, rel=0.08)


def test_kstep_averages_every_K_steps() -> None:
    result = run(cluster(), "kstep", strategy_options={"K": 5, "reject": 0.0}, steps=40)
    assert result.samples_per_s == pytest.approx(400 / (1 + 1.2 / 5), rel=0.05)
    assert result.bytes_per_step == pytest.approx(2 * 3 / 4 * 1e8 / 5, rel=0.2)


def test_gossip_never_delays_a_gradient() -> None:
    """Also if an exchange takes as long as eight gradients."""
    slow_link = cluster(link={"between": {"gbit_per_s": 0.1}})
    result = run(slow_link, "adpsgd", steps=80)
    assert result.efficiency > 0.99
    assert result.exchanges / 4 == pytest.approx(80 / 8, abs=3)


def test_learners_share_the_bandwidth_of_a_shared_link() -> None:
    """Four learners of a machine exchange with other machines, over one link each or over one link for all."""
    link = {"gbit_per_s": 1.0}
    shared = run(cluster(2, 4, link={"between": {**link, "shared": True}}), "adpsgd", topology="complete", steps=60)
    own = run(cluster(2, 4, link={"between": {**link, "shared": False}}), "adpsgd", topology="complete", steps=60)
    assert shared.exchanges < 0.8 * own.exchanges


@pytest.mark.parametrize("factor", [2.0, 10.0])
def test_a_straggler_slows_collectives_and_not_gossip(factor: float) -> None:
    link = {"between": {"gbit_per_s": 100.0}}
    slow = cluster(8, 1, link=link, straggler=[{"learner": 3, "factor": factor}])
    even = cluster(8, 1, link=link)
    # many steps, because the other ranks are ahead at first; on a ring by as many steps as there are ranks between
    for name, steps in (("sync", 20), ("delay_by_one", 60), ("dpsgd", 100)):
        ratio = run(even, name, steps=steps).samples_per_s / run(slow, name, steps=steps).samples_per_s
        assert ratio == pytest.approx(factor, rel=0.06), name
    lost = run(slow, "adpsgd", steps=40).samples_per_s / run(even, "adpsgd", steps=40).samples_per_s
    assert lost == pytest.approx((7 + 1 / factor) / 8, rel=0.05)


def test_a_straggler_can_be_slow_for_an_interval() -> None:
    temporary = cluster(2, 1, straggler=[{"machine": 1, "factor": 3.0, "from_s": 5.0, "to_s": 11.0}], link={})
    result = run(temporary, "sync")
    assert result.elapsed_s == pytest.approx(20 + 2 * 2.0, abs=1.0)  # two steps of 3 s


def test_a_slow_loader_limits_the_rate() -> None:
    result = run(cluster(2, 1, link={}, loader={"samples_per_s": 50.0}), "sync")
    assert result.samples_per_s == pytest.approx(2 * 50, rel=0.08)
    assert result.per_learner[0]["data_s"] > 0.4 * result.elapsed_s


def test_shared_weights_are_copied_twice_a_step() -> None:
    result = run(cluster(memory={"device_gb_per_s": 1.0}), "adpsgd")  # 0.1 s each way
    assert result.samples_per_s == pytest.approx(400 / 1.2, rel=0.03)


def test_hierarchy_sends_one_model_per_machine() -> None:
    flat = run(cluster(4, 4, learner={"seconds_per_sample": 0.1}), "adpsgd")
    grouped = run(cluster(4, 4, learner={"seconds_per_sample": 0.1}), "hierarchical(adpsgd)")
    assert grouped.exchanges < flat.exchanges / 3
    assert grouped.efficiency > 0.95


def test_staleness_of_asgd_is_about_the_number_of_other_learners() -> None:
    result = run(cluster(8, 1, link={"between": {"gbit_per_s": 100.0}}), "asgd", steps=40)
    assert 5 < result.staleness_mean < 7  # updates queued before the own read do not count


# ---------------------------------------------------------------------------------------------------------- failures


def test_gossip_continues_without_failed_ranks() -> None:
    failing = cluster(6, 1, failures=[{"learner": 2, "at_s": 7.5}])
    result = run(failing, "adpsgd", steps=30)
    assert set(result.lost) == {2}
    assert "failed at 7.5 s" in result.lost[2]
    assert result.per_learner[2] == {}
    assert sum(r.get("samples", 0) for r in result.per_learner if r) >= 30 * 100 * 6 - 10 * 100  # leases went back


def test_a_whole_machine_can_fail_in_a_hierarchy() -> None:
    failing = cluster(3, 2, failures=[{"machine": 1, "at_s": 7.5}])
    result = run(failing, "hierarchical(adpsgd)", steps=20)
    assert set(result.lost) == {2, 3}


def test_the_ranks_of_a_failed_node_leader_fail_with_it() -> None:
    failing = cluster(3, 2, failures=[{"learner": 2, "at_s": 7.5}])
    result = run(failing, "hierarchical(adpsgd)", steps=20)
    assert set(result.lost) == {2, 3}


@pytest.mark.parametrize("strategy", ["sync", "kstep", "bmuf", "dpsgd", "delay_by_one", "asgd"])
def test_a_collective_names_the_lost_rank(strategy: str) -> None:
    failing = cluster(3, 1, failures=[{"learner": 0, "at_s": 7.5}])
    with pytest.raises(PeerLost, match=r"rank 0 \(failed at 7.5 s\) was lost"):
        run(failing, strategy)


# ------------------------------------------------------------------------------------------------------------- cost


@pytest.mark.parametrize("strategy", ["sync", "adpsgd", "hierarchical(adpsgd)", "dpsgd"])
def test_events_per_learner_and_step_do_not_grow(strategy: str) -> None:
    """Counted in events, since seconds depend on the machine: cost is linear in learners x steps."""

    def events(machines: int, steps: int) -> float:
        on = cluster(machines, 4, learner={"seconds_per_sample": 0.01, "jitter": {"kind": "gaussian"}})
        return run(on, strategy, steps=steps, batch=4).events / (machines * 4 * steps)

    few, more, longer = events(2, 20), events(12, 20), events(2, 80)
    assert more < 1.25 * few
    assert longer < 1.25 * few


def test_the_seed_determines_the_events() -> None:
    on = cluster(4, 2, learner={"seconds_per_sample": 0.01, "jitter": {"kind": "heavy_tail"}})
    first, second, other = (run(on, "adpsgd", seed=seed, topology="random_ring") for seed in (0, 0, 1))
    assert first.digest == second.digest
    assert first.summary() == second.summary()
    assert first.digest != other.digest
