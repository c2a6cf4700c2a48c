"""From a client's request to tokens and back: the API, the session's two sides, and the chat in a
terminal.
"""

from p2pllm.serving.allocator import Allocator
from p2pllm.serving.client import ApiClient, Figures, api_client
from p2pllm.serving.entry import SECRET_BYTES, Generator, Network, Router
from p2pllm.serving.front import Api, ApiKeys, Completer
from p2pllm.serving.operator import OPERATOR_COMMANDS, Operator
from p2pllm.serving.repl import chat_loop, print_answer
from p2pllm.serving.stage import Stages
from p2pllm.serving.status import Status
from p2pllm.serving.tables import make_console, print_swarm, ranges, swarm_table

__all__ = [
    "OPERATOR_COMMANDS",
    "SECRET_BYTES",
    "Allocator",
    "Api",
    "ApiClient",
    "ApiKeys",
    "Completer",
    "Figures",
    "Generator",
    "Network",
    "Operator",
    "Router",
    "Stages",
    "Status",
    "api_client",
    "chat_loop",
    "make_console",
    "print_answer",
    "print_swarm",
    "ranges",
    "swarm_table",
]
