"""How peers talk: messages, their frames, and the authenticated links that carry them."""

from p2pllm.transport.certificate import Certificate, make_certificate
from p2pllm.transport.client import LINK_PATH
from p2pllm.transport.frames import Limits, decode, encode
from p2pllm.transport.links import Links
from p2pllm.transport.messages import (
    ENTRY_STAGE,
    HASH_BYTES,
    MAX_CHUNK_TOKENS,
    MAX_GOSSIP_RECORDS,
    MAX_PREFIX_BYTES,
    MAX_STAGES,
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
    Token,
    Tokens,
)
from p2pllm.transport.server import Server, serve

__all__ = [
    "ENTRY_STAGE",
    "HASH_BYTES",
    "LINK_PATH",
    "MAX_CHUNK_TOKENS",
    "MAX_GOSSIP_RECORDS",
    "MAX_PREFIX_BYTES",
    "MAX_STAGES",
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
    "Server",
    "Token",
    "Tokens",
    "decode",
    "encode",
    "make_certificate",
    "serve",
]
