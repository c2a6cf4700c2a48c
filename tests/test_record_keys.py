"""Where records lie: a key of its own for each purpose, and no record anywhere else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.bodies import METRICS, PEER, SWARM

from p2pllm.identity import Identity
from p2pllm.records import (
    MAX_DIRECTORY_BITS,
    MAX_PLAN_PARTS,
    Body,
    ClaimBody,
    PlanBody,
    SwarmBody,
    directory_key,
    directory_keys,
    leader_key,
    peek,
    plan_key,
    seal,
    swarm_id,
    swarms_key,
    swarms_keys,
)

IDENTITY = Identity.from_seed(bytes(32))
OTHER_SWARM = bytes(reversed(SWARM))
WIDTHS = range(MAX_DIRECTORY_BITS + 1)

node_ids = st.binary(min_size=20, max_size=20)

CLAIM = ClaimBody(epoch=1, bits=0)
PLAN = PlanBody(1, 1, 0, 1, 0, 0, 0.0, False, ())
INDEX = SwarmBody("model", "fingerprint", 30)


def keys_of(swarm: bytes) -> list[bytes]:
    """Every key that a swarm of any size uses, but for the index of all swarms."""
    return [
        leader_key(swarm),
        *(plan_key(swarm, part) for part in range(MAX_PLAN_PARTS)),
        *(key for bits in WIDTHS for key in directory_keys(swarm, bits)),
    ]


def own_keys(body: Body, swarm: bytes) -> set[bytes]:
    """Where the record of ``IDENTITY`` may lie, said another way than the code under test does."""
    match body:
        case ClaimBody():
            return {leader_key(swarm)}
        case PlanBody():
            return {plan_key(swarm, part) for part in range(MAX_PLAN_PARTS)}
        case SwarmBody():
            return {swarms_key(swarm)}
        case _:
            first_bits = f"{int(IDENTITY.peer_id, 16):0160b}"
            return {directory_keys(swarm, bits)[int("0" + first_bits[:bits], 2)] for bits in WIDTHS}


def test_all_keys_of_all_swarms_are_20_bytes_and_different() -> None:
    keys = [*keys_of(SWARM), *keys_of(OTHER_SWARM), *swarms_keys(), SWARM, OTHER_SWARM]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {20}


@given(node_ids, st.sampled_from(WIDTHS))
def test_every_peer_belongs_to_exactly_one_shard_of_each_width(node_id: bytes, bits: int) -> None:
    shards = directory_keys(SWARM, bits)
    assert len(shards) == 2**bits
    assert shards.count(directory_key(SWARM, node_id, bits)) == 1


@given(node_ids, node_ids, st.sampled_from(WIDTHS))
def test_peers_share_a_shard_if_their_ids_begin_alike(one: bytes, other: bytes, bits: int) -> None:
    def begin(node_id: bytes) -> str:
        return f"{int.from_bytes(node_id):0160b}"[:bits]

    together = directory_key(SWARM, one, bits) == directory_key(SWARM, other, bits)
    assert together == (begin(one) == begin(other))


@pytest.mark.parametrize("body", [PEER, METRICS, CLAIM, PLAN, INDEX], ids=lambda body: body.kind)
def test_a_record_belongs_under_the_keys_of_its_purpose_only(body: Body) -> None:
    header = peek(seal(IDENTITY, body, swarm=SWARM, seq=1, ttl=5))
    own = own_keys(body, SWARM)
    almost = [key[:1] + bytes([key[1] ^ 1]) + key[2:] for key in own]
    keys = [*keys_of(SWARM), *keys_of(OTHER_SWARM), *swarms_keys(), *almost, bytes(20), b""]
    assert {key for key in keys if header.belongs_under(key)} == own


@given(node_ids)
def test_every_swarm_is_listed_in_one_part_of_the_index(swarm: bytes) -> None:
    assert swarms_keys().count(swarms_key(swarm)) == 1


def test_the_parts_of_a_plan_are_spread_over_the_dht() -> None:
    firsts = {plan_key(SWARM, part)[0] for part in range(MAX_PLAN_PARTS)}
    assert len(firsts) == MAX_PLAN_PARTS


def test_a_swarm_is_named_by_its_model() -> None:
    assert swarm_id("one") == swarm_id("one") != swarm_id("two")
