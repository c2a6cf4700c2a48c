"""The signed records that peers publish about themselves.

One envelope for all of them, BEP-44 style (mutable, Ed25519, sequence number), as a msgpack array::

    [version, kind, swarm, public key, seq, ttl in ms, body, signature]

The signature covers the packed bytes before it, exactly as they travel, so nothing depends on how a msgpack
library chooses to encode. Everything is checked when a record is opened; what comes out is frozen and typed.
"""

from p2pllm.records.bodies import Body, Kind, MetricsBody, PeerBody, Span, SpanState, SwarmBody
from p2pllm.records.envelope import MAX_RECORD_BYTES, MAX_TTL_S, Header, Record, open_record, peek, seal
from p2pllm.records.keys import directory_key, swarm_id, swarms_key

__all__ = [
    "MAX_RECORD_BYTES",
    "MAX_TTL_S",
    "Body",
    "Header",
    "Kind",
    "MetricsBody",
    "PeerBody",
    "Record",
    "Span",
    "SpanState",
    "SwarmBody",
    "directory_key",
    "open_record",
    "peek",
    "seal",
    "swarm_id",
    "swarms_key",
]
