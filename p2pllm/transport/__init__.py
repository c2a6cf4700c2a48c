"""How peers talk: messages, their frames, and the authenticated links that carry them."""

from p2pllm.transport.certificate import Certificate, make_certificate
from p2pllm.transport.client import LINK_PATH
from p2pllm.transport.fields import (
    ENTRY_STAGE,
    HASH_BYTES,
    MAX_CHUNK_TOKENS,
    MAX_GENERATION,
    MAX_GOSSIP_RECORDS,
    MAX_PREFIX_BYTES,
    MAX_STAGES,
)
from p2pllm.transport.frames import Limits, decode, encode
from p2pllm.transport.links import Links
from p2pllm.transport.messages import (
    Close,
    Failed,
    Gossip,
    Hidden,
    Message,
    Open,
    Opened,
    Ping,
    Pong,
    Renew,
    Replay,
    Reroute,
    Resume,
    Token,
    Tokens,
    Where,
)
from p2pllm.transport.rows import ROUNDED, pack_rows, unpack_rows
from p2pllm.transport.server import Server, serve

__all__ = [
    "ENTRY_STAGE",
    "HASH_BYTES",
    "LINK_PATH",
    "MAX_CHUNK_TOKENS",
    "MAX_GENERATION",
    "MAX_GOSSIP_RECORDS",
    "MAX_PREFIX_BYTES",
    "MAX_STAGES",
    "ROUNDED",
    "Certificate",
    "Close",
    "Failed",
    "Gossip",
    "Hidden",
    "Limits",
    "Links",
    "Message",
    "Open",
    "Opened",
    "Ping",
    "Pong",
    "Renew",
    "Replay",
    "Reroute",
    "Resume",
    "Server",
    "Token",
    "Tokens",
    "Where",
    "decode",
    "encode",
    "make_certificate",
    "pack_rows",
    "serve",
    "unpack_rows",
]
