"""The election: one agreed leader soon after whatever happens, and nobody deposed by those who join."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.electorate import Electorate

from p2pllm.records import MAX_EPOCH, ClaimBody
from p2pllm.swarm.placement.election import Election

NAMES = "abcdefghi"


def swarm(names: str, seed: int = 0, **network: float) -> Electorate:
    peers = Electorate(seed, **network)
    for name in names:
        peers.join(name)
    peers.until_agreed(2.0)
    return peers


def test_a_lone_peer_leads_at_once() -> None:
    election = Election("a", epoch=6)
    assert election.tick(100.0, {"a"}, joined=False) is None
    assert election.tick(100.1, {"a"}, joined=True) == 7
    assert (election.leader, election.leads(100.1), election.epoch) == ("a", True, 7)
    assert election.tick(100.5, {"a"}, joined=True) is None
    assert election.tick(101.1, {"a"}, joined=True) == 7
    assert election.leaderless_s(101.1) == 0.0


def test_who_stands_leads_once_somebody_has_stored_its_claim() -> None:
    election = Election("a")
    assert election.tick(0.0, {"a", "b"}, joined=True) == 1
    assert not election.leads(0.0)
    assert election.leader is None
    election.published(0.0)
    election.tick(0.2, {"a", "b"}, joined=True)
    assert (election.leads(0.2), election.leader) == (True, "a")


def test_it_stops_issuing_at_three_quarters_of_a_lease_but_goes_on_claiming() -> None:
    election = Election("a")
    election.tick(0.0, {"a", "b"}, joined=True)
    election.published(0.0)
    claims = [election.tick(now, {"a", "b"}, joined=True) for now in (1.0, 2.0, 2.2)]
    assert claims == [1, 1, None]
    assert election.leads(2.2)
    assert not election.leads(2.25)
    assert election.tick(3.1, {"a", "b"}, joined=True) == 1
    assert election.leader is None
    election.published(3.1)
    assert election.leads(3.2)


def test_a_higher_claim_deposes_at_once_and_a_lower_one_never() -> None:
    election = Election("b", epoch=4)
    election.tick(0.0, {"a", "b", "c"}, joined=True)
    election.published(0.0)
    election.hear("c", ClaimBody(4, 0), 1, 0.1)
    election.hear("a", ClaimBody(5, 0), 1, 0.1)
    assert election.leads(0.1)
    election.hear("c", ClaimBody(5, 3), 2, 0.2)
    assert not election.leads(0.2)
    assert election.tick(1.2, {"a", "b", "c"}, joined=True) is None
    assert (election.leader, election.claim) == ("c", ClaimBody(5, 3))


@pytest.mark.parametrize(("own", "stands_s"), [("d", 3.0), ("c", 3.5), ("a", 4.5)])
def test_after_a_lease_of_silence_peers_stand_in_order_of_their_ids(own: str, stands_s: float) -> None:
    election = Election(own)
    eligible = {"a", "b", "c", "d", "leader"}  # who fell silent is not waited for
    election.hear("leader", ClaimBody(8, 0), 1, 10.0)
    for tenth in range(round(stands_s * 10)):
        assert election.tick(10.0 + tenth / 10, eligible, joined=True) is None
    assert election.tick(10.0 + stands_s, eligible, joined=True) == 9


def test_ids_that_somebody_made_up_do_not_put_a_takeover_off() -> None:
    election = Election("a")
    eligible = {"a", "leader", *(f"z{number}" for number in range(4000))}
    election.hear("leader", ClaimBody(8, 0), 1, 0.0)
    election.tick(0.0, eligible, joined=True)
    assert election.tick(10.9, eligible, joined=True) is None
    assert election.tick(11.0, eligible, joined=True) == 9


def test_only_claims_with_newer_numbers_keep_a_leader() -> None:
    election = Election("a")
    election.hear("b", ClaimBody(1, 0), 7, 0.0)
    for tenth in range(1, 30):
        assert not election.hear("b", ClaimBody(1, 0), 7 - tenth % 2, tenth / 10)
        assert election.tick(tenth / 10, {"a", "b"}, joined=True) is None
    assert election.tick(3.0, {"a", "b"}, joined=True) == 2
    assert not election.hear("b", ClaimBody(1, 0), 7, 100.0), "long over, and still known"


def test_a_peer_that_is_leaving_or_not_in_the_view_does_not_lead() -> None:
    election = Election("a")
    election.tick(0.0, {"a"}, joined=True)
    assert election.tick(1.0, {"b"}, joined=True) is None
    assert not election.leads(1.0)
    assert election.leaderless_s(4.0) == 4.0
    election.tick(4.0, {"b"}, joined=True)
    assert election.leaderless_s(7.0) == 7.0


def test_claims_of_strangers_count_only_until_the_view_must_be_complete() -> None:
    election = Election("a")
    election.hear("z", ClaimBody(3, 0), 1, 0.0)
    assert election.tick(0.0, {"a"}, joined=True) is None
    assert election.leader == "z"
    election.hear("z", ClaimBody(MAX_EPOCH, 0), 2, 2.9)
    assert election.tick(3.1, {"a"}, joined=True) == 1, "what a stranger claims is no epoch"
    assert election.leads(3.1)


def test_strangers_cannot_make_a_peer_forget_the_leader_or_remember_them_all() -> None:
    election = Election("a")
    election.hear("leader", ClaimBody(1, 0), 1, 0.0)
    election.tick(0.0, {"a", "leader"}, joined=True)
    for number in range(1000):
        election.hear(f"z{number}", ClaimBody(9, 0), 1, 0.1)
    assert election.tick(2.5, {"a", "leader"}, joined=True) is None
    assert not election.hear("leader", ClaimBody(1, 0), 1, 2.6)
    assert election.leader == "leader"
    assert len(election._claims) <= 17


def test_an_epoch_that_is_over_stays_over() -> None:
    election = Election("a")
    election.hear("b", ClaimBody(9, 0), 1, 0.0)
    election.tick(0.0, {"a", "b", "c"}, joined=True)
    for tenth in range(1, 30):
        election.hear("c", ClaimBody(6, 0), tenth, tenth / 10)
        assert election.tick(tenth / 10, {"a", "c"}, joined=True) is None
        assert election.leader != "c"
    assert election.tick(3.5, {"a", "c"}, joined=True) == 10
    election.published(3.5)
    election.hear("d", ClaimBody(12, 0), 1, 4.0)
    election.tick(4.0, {"a", "c", "d"}, joined=True)
    assert election.tick(7.5, {"a", "c"}, joined=True) == 13, "its own is over as well"


def test_an_absurd_epoch_locks_nobody_out() -> None:
    peers = swarm("abcd")
    for voter in peers.voters.values():
        voter.heard["evil"] = peers.now
        voter.election.hear("evil", ClaimBody(MAX_EPOCH, 0), 1, peers.now + voter.clock)
    peers.run(1.0)
    assert {voter.election.leader for voter in peers.voters.values()} == {"evil"}
    peers.run(2.0)
    peers.until_agreed(2.0)
    leader = peers.agreed()
    assert leader is not None
    peers.crash(leader)
    peers.run(1.0)
    peers.until_agreed(3.1)
    assert peers.agreed() not in (None, leader, "evil")
    peers.join("e")
    peers.run(2.0)
    assert peers.agreed() not in (None, "e")


def test_epochs_go_on_where_they_were_before_everybody_was_gone() -> None:
    peers = swarm("abc")
    for name in "abc":
        peers.crash(name)
    before = max(peers.disk.values())
    assert before >= 1
    peers.run(60.0)
    for name in "abc":
        peers.join(name)
    peers.until_agreed(2.0)
    assert all(voter.election.epoch == before + 1 for voter in peers.voters.values())


def test_a_peer_that_lost_its_disk_learns_what_it_had_claimed() -> None:
    election = Election("a")
    assert election.tick(0.0, {"a", "b"}, joined=True) == 1
    election.hear("a", ClaimBody(5, 0), 1, 0.1)
    assert election.tick(0.2, {"a", "b"}, joined=True) == 6


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.data())
def test_one_leader_soon_after_whatever_happens(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, len(NAMES)))
    peers = Electorate(data.draw(st.integers(0, 2**32)), loss=data.draw(st.sampled_from([0.0, 0.01, 0.05])))
    for name in NAMES[:count]:
        peers.join(name)
        peers.run(data.draw(st.sampled_from([0.0, 0.1, 1.0])))
    peers.run(1.0)
    peers.until_agreed(3.0)
    for _ in range(data.draw(st.integers(1, 4))):
        match data.draw(st.sampled_from(["crash", "join", "part", "restart"])):
            case "crash" if len(peers.voters) > 1:
                # A leader mostly: that another one goes is no news.
                leader = peers.agreed()
                victim = data.draw(st.sampled_from([leader, leader, sorted(peers.voters)[0]]))
                assert victim is not None
                peers.crash(victim)
                peers.run(1.0)
                peers.until_agreed(4.0)
                peers.disk.pop(victim)
                peers.run(6.0)
            case "join" if len(peers.voters) < len(NAMES):
                leader = peers.agreed()
                peers.join(next(name for name in NAMES if name not in peers.voters))
                for _ in range(50):
                    peers.run(0.1)
                    assert peers.agreed() in (leader, None)
                assert peers.agreed() == leader, "a peer that joined deposed the leader"
            case "part":
                names = sorted(peers.voters)
                cut = data.draw(st.integers(0, len(names)))
                names = data.draw(st.permutations(names))
                peers.part(names[:cut], names[cut:])
                peers.run(data.draw(st.sampled_from([2.0, 8.0, 20.0])))
                peers.part(names)
                peers.run(1.0)
                peers.until_agreed(3.2)
            case "restart":
                victims = data.draw(st.lists(st.sampled_from(sorted(peers.voters)), unique=True))
                for name in victims:
                    peers.crash(name)
                for name in victims:
                    peers.join(name)
                peers.run(1.0)
                peers.until_agreed(3.2)
    lasting, peers.leaders = peers.agreed(), []
    peers.run(10.0)
    assert {leader for _, leader, _ in peers.leaders} == {lasting}, "a leader is not deposed for nothing"


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.integers(0, 2**32), st.integers(3, 9))
def test_takeover_is_quick_and_smooth(seed: int, count: int) -> None:
    peers = swarm(NAMES[:count], seed)
    peers.run(5.0)
    leader = peers.agreed()
    assert leader is not None
    peers.crash(leader)
    peers.leaders = []
    peers.until_agreed(4.0)
    # The others see who stands before it is their turn.
    assert len({(epoch, peer) for _, peer, epoch in peers.leaders}) == 1
