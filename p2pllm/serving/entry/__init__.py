"""The entry side of a request: from a prompt of token ids to a stream of them, whatever befalls its chain."""

from p2pllm.serving.entry.generation import Generated, Generation, Generator
from p2pllm.serving.entry.opening import RESERVE_AHEAD
from p2pllm.serving.entry.prefix import SECRET_BYTES
from p2pllm.serving.entry.request import Network
from p2pllm.serving.entry.router import Router

__all__ = ["RESERVE_AHEAD", "SECRET_BYTES", "Generated", "Generation", "Generator", "Network", "Router"]
