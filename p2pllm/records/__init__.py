"""The signed records that peers publish about themselves.

One envelope for all of them, BEP-44 style (mutable, Ed25519, sequence number), as a msgpack array::

    [version, kind, swarm, public key, seq, ttl in ms, body, signature]

In a private swarm the body is sealed with the swarm's key. The signature covers the packed bytes before it,
exactly as they travel, so nothing depends on how a msgpack library chooses to encode. Everything is checked
when a record is opened; what comes out is frozen and typed.
"""

from p2pllm.records.bodies import Body, SwarmBody
from p2pllm.records.envelope import MAX_RECORD_BYTES, MAX_TTL_S, Header, Record, open_record, peek, seal
from p2pllm.records.keys import (
    MAX_DIRECTORY_BITS,
    MAX_PLAN_PARTS,
    directory_key,
    directory_keys,
    leader_key,
    plan_key,
    swarm_id,
    swarms_key,
    swarms_keys,
)
from p2pllm.records.leader_bodies import PLAN_ENTRIES, ClaimBody, PlanBody, PlanEntry
from p2pllm.records.limits import MAX_EPOCH, Kind
from p2pllm.records.member_bodies import MetricsBody, PeerBody, Span, SpanState
from p2pllm.records.secrecy import SwarmKey, read_swarm_key

__all__ = [
    "MAX_DIRECTORY_BITS",
    "MAX_EPOCH",
    "MAX_PLAN_PARTS",
    "MAX_RECORD_BYTES",
    "MAX_TTL_S",
    "PLAN_ENTRIES",
    "Body",
    "ClaimBody",
    "Header",
    "Kind",
    "MetricsBody",
    "PeerBody",
    "PlanBody",
    "PlanEntry",
    "Record",
    "Span",
    "SpanState",
    "SwarmBody",
    "SwarmKey",
    "directory_key",
    "directory_keys",
    "leader_key",
    "open_record",
    "peek",
    "plan_key",
    "read_swarm_key",
    "seal",
    "swarm_id",
    "swarms_key",
    "swarms_keys",
]
