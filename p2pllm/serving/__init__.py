"""From a client's request to tokens and back: the API, the session's two sides, and the chat in a
terminal.
"""

from p2pllm.serving.api import Api
from p2pllm.serving.client import ApiClient, Figures, api_client
from p2pllm.serving.completion import Completer
from p2pllm.serving.generation import Generator
from p2pllm.serving.repl import chat_loop, print_answer
from p2pllm.serving.router import Router
from p2pllm.serving.session import Network
from p2pllm.serving.stages import Stages
from p2pllm.serving.status import chain_json, swarm_json
from p2pllm.serving.tables import make_console, print_swarm, ranges

__all__ = [
    "Api",
    "ApiClient",
    "Completer",
    "Figures",
    "Generator",
    "Network",
    "Router",
    "Stages",
    "api_client",
    "chain_json",
    "chat_loop",
    "make_console",
    "print_answer",
    "print_swarm",
    "ranges",
    "swarm_json",
]
