"""What this node remembers of each address: who proved to be there, how fast it answers, if it is silent.

Sans-IO: the clock's reading is an argument. All of it is bounded, the address longest unheard of is
forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from p2pllm.dht.contacts import Address
from p2pllm.dht.wire import NO_TOKEN

__all__ = ["Liveness"]

MIN_TIMEOUT_S: Final = 0.12
MAX_TIMEOUT_S: Final = 0.5
FIRST_SILENCE_S: Final = 8.0
MAX_SILENCE_S: Final = 64.0
STRIKES_TO_FORGET: Final = 3
GREET_S: Final = 1.0

_MAX_ADDRESSES = 4096


@dataclass(slots=True)
class _Memory:
    token: bytes = NO_TOKEN
    rtt: float | None = None
    heard: float = float("-inf")
    strikes: int = 0
    silent_until: float = float("-inf")
    greeted: float = float("-inf")
    proven: bytes | None = None


class Liveness:
    """Proven ids, round-trip times, access tokens and the negative cache, per address."""

    def __init__(self) -> None:
        self._memories: OrderedDict[Address, _Memory] = OrderedDict()
        self._typical_rtt: float | None = None

    def token(self, address: Address) -> bytes:
        """The token that the node there last gave us."""
        memory = self._memories.get(address)
        return memory.token if memory else NO_TOKEN

    def proven(self, address: Address) -> bytes | None:
        """The id of the node that has proved to be there, if one has."""
        memory = self._memories.get(address)
        return memory.proven if memory else None

    def timeout(self, address: Address) -> float:
        """How long to wait for one answer, in seconds; a stranger is taken to be as far as most."""
        memory = self._memories.get(address)
        rtt = memory.rtt if memory and memory.rtt is not None else self._typical_rtt
        return MAX_TIMEOUT_S if rtt is None else min(max(3 * rtt, MIN_TIMEOUT_S), MAX_TIMEOUT_S)

    def silent(self, address: Address, now: float) -> bool:
        """Whether the node there failed to answer so recently that asking again would be a waste."""
        memory = self._memories.get(address)
        return memory is not None and now < memory.silent_until

    def forgettable(self, address: Address) -> bool:
        """Whether it stayed silent so often that its place should go to another."""
        memory = self._memories.get(address)
        return memory is not None and memory.strikes >= STRIKES_TO_FORGET

    def heard(self, address: Address) -> float:
        """When the node there last proved to be alive."""
        memory = self._memories.get(address)
        return memory.heard if memory else float("-inf")

    def answered(self, address: Address, rtt: float, token: bytes, now: float) -> None:
        """A reply came ``rtt`` seconds after the question, in time or not."""
        memory = self._alive(address, now)
        memory.token = token
        memory.rtt = _smooth(memory.rtt, rtt)
        self._typical_rtt = _smooth(self._typical_rtt, rtt)

    def proved(self, address: Address, node_id: bytes) -> None:
        """The node there has proved its id."""
        self._memory(address).proven = node_id

    def may_greet(self, address: Address, now: float) -> bool:
        """Count one greeting, unless there was one within the last second."""
        memory = self._memory(address)
        if now < memory.greeted + GREET_S:
            return False
        memory.greeted = now
        return True

    def asked(self, address: Address, now: float) -> None:
        """A request came that proves its sender is there."""
        self._alive(address, now)

    def missed(self, address: Address, now: float) -> None:
        """No answer to any try: silent for 8 s, and for twice as long after each further miss.

        Questions that were under way together count as one: a node that is busy for a moment is not gone.
        """
        memory = self._memory(address)
        if now < memory.silent_until:
            return
        memory.silent_until = now + min(FIRST_SILENCE_S * 2.0**memory.strikes, MAX_SILENCE_S)
        memory.strikes = min(memory.strikes + 1, STRIKES_TO_FORGET)
        if memory.strikes == STRIKES_TO_FORGET:
            memory.proven = None  # whoever is there next has to prove it again

    def _alive(self, address: Address, now: float) -> _Memory:
        memory = self._memory(address)
        memory.heard = now
        memory.strikes = 0
        memory.silent_until = float("-inf")
        return memory

    def _memory(self, address: Address) -> _Memory:
        memory = self._memories.setdefault(address, _Memory())
        self._memories.move_to_end(address)
        if len(self._memories) > _MAX_ADDRESSES:
            self._memories.popitem(last=False)
        return memory


def _smooth(average: float | None, sample: float) -> float:
    return sample if average is None else average + (sample - average) / 8
