"""What clients meet: the API, who may use it how much, and whose turn it is."""

from p2pllm.serving.front.admission import Outlook
from p2pllm.serving.front.api import Api
from p2pllm.serving.front.completion import Completer
from p2pllm.serving.front.keys import ApiKeys

__all__ = ["Api", "ApiKeys", "Completer", "Outlook"]
