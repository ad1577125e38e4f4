"""Single events of the gossip protocol."""

from __future__ import annotations

from collections.abc import Sequence

from roundelay.comm.gossip.protocol import LAST_RETRY_S, Discard, GossipProtocol, Receive, SendSnapshot


class Partners:
    """Ranks 0 and 1 are partners in every round."""

    edges = frozenset({(0, 1)})
    calls = 0

    def __call__(self, round: int) -> Sequence[int]:
        self.calls += 1
        return (1, 0)


def test_an_outdated_handshake_sends_no_snapshot_that_the_peer_has_applied() -> None:
    protocol = GossipProtocol(1, 2, Partners())
    protocol.connected(0, 0, 0.0)
    protocol.announced(0, 1, 0.1)
    protocol.received(0, 1, 0.2)
    protocol.acknowledged(0, 1, 0.3)
    protocol.disconnected(0, 0.4)
    assert protocol.connected(0, 0, 0.5) == []


def test_the_next_snapshot_of_a_peer_acknowledges_the_last_one() -> None:
    protocol = GossipProtocol(1, 2, Partners())
    protocol.connected(0, 0, 0.0)
    protocol.announced(0, 1, 0.1)
    protocol.received(0, 1, 0.2)
    protocol.disconnected(0, 0.3)  # with the acknowledgment
    protocol.connected(0, 0, 0.4)
    assert protocol.announced(0, 2, 0.5) == [Discard(0, 1), SendSnapshot(0, 2, fresh=True), Receive(0, 2)]


def test_suspicion_of_a_partner_in_shared_memory_ends_without_an_exchange_of_its_own() -> None:
    protocol = GossipProtocol(0, 2, Partners(), 1.0, [1])
    actions = protocol.step(0.0)
    while actions:
        actions = protocol.busy(1, 0.0)
    assert protocol.silent_peers() == [1]
    protocol.averaged_by_peer(3, 3)  # nothing is due
    protocol.tick(LAST_RETRY_S)
    assert protocol.silent_peers() == []


def test_a_rank_without_an_available_partner_looks_up_no_rounds() -> None:
    matching = Partners()
    protocol = GossipProtocol(0, 2, matching)
    for number in range(10):
        protocol.step(float(number))
    assert matching.calls == 0


def test_an_acknowledgment_starts_the_exchange_that_waited_for_it() -> None:
    protocol = GossipProtocol(0, 2, Partners())
    protocol.connected(1, 0, 0.0)
    assert protocol.step(0.1) == [SendSnapshot(1, 1, fresh=True)]
    protocol.announced(1, 1, 0.2)
    protocol.received(1, 1, 0.3)
    assert protocol.step(0.4) == [], "the partner has not applied the last exchange"
    assert protocol.acknowledged(1, 1, 0.5) == [Discard(1, 1), SendSnapshot(1, 2, fresh=True)]
