"""What lies between a member and the network: it counts what passes, and loses what it is told to lose."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from p2pllm.config import Address
from p2pllm.errors import LinkError
from p2pllm.identity import PeerId
from p2pllm.transport import Gossip, Links, Message

__all__ = ["Traffic", "WiredLinks", "Wires"]


@dataclass(slots=True)
class Traffic:
    """What one member has received and sent: datagrams, their bytes, and bytes of messages over links."""

    datagrams_in: int = 0
    datagrams_out: int = 0
    datagram_bytes_in: int = 0
    datagram_bytes_out: int = 0
    link_bytes_in: int = 0
    link_bytes_out: int = 0


class Wires:
    """All that one member hears and says passes here.

    ``loses`` says whether a datagram to an address gets lost on the way, ``parts`` whether this member can
    neither dial a peer nor hear it over the link that there may be: it stays up, and silent.
    """

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.loses: Callable[[Address], bool] = lambda _: False
        self.parts: Callable[[PeerId], bool] = lambda _: False

    def wrap(self, transport: asyncio.DatagramTransport) -> asyncio.DatagramTransport:
        """Come between a DHT node and its socket."""
        transport.set_protocol(_Ear(transport.get_protocol(), self.traffic))
        return _Mouth(transport, self)


class WiredLinks(Links):
    """Links over ``wires``, whose traffic counts the records that go over them.

    What encryption and TCP add is not counted: only the system sees it.
    """

    def __init__(
        self, *arguments: Any, wires: Wires, on_message: Callable[[PeerId, Message], None], **others: Any
    ) -> None:
        """What Links takes, and the ``wires``."""
        self._wires = wires

        def hear(sender: PeerId, message: Message) -> None:
            if not wires.parts(sender):
                wires.traffic.link_bytes_in += _size(message)
                on_message(sender, message)

        super().__init__(*arguments, on_message=hear, **others)

    def send(self, peer: PeerId, message: Message) -> None:
        """Send, unless the way to the peer is cut: then it is gone without a word."""
        self._wires.traffic.link_bytes_out += _size(message)
        if not self._wires.parts(peer):
            super().send(peer, message)

    async def ensure(
        self, peer: PeerId, addresses: Sequence[Address], certificate: bytes, timeout: float = 2.0
    ) -> None:
        """Dial, unless the way to the peer is cut. Raises LinkError."""
        if self._wires.parts(peer):
            raise LinkError(f"cannot reach peer {peer[:8]}: the way is cut")
        await super().ensure(peer, addresses, certificate, timeout)


def _size(message: Message) -> int:
    return sum(map(len, message.records)) if isinstance(message, Gossip) else 0


class _Ear(asyncio.DatagramProtocol):
    """Passes on to a node what its socket received."""

    def __init__(self, node: Any, traffic: Traffic) -> None:
        self._node = node
        self._traffic = traffic

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        self._traffic.datagrams_in += 1
        self._traffic.datagram_bytes_in += len(data)
        self._node.datagram_received(data, addr)

    def error_received(self, exc: Exception) -> None:
        self._node.error_received(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        self._node.connection_lost(exc)

    def pause_writing(self) -> None:
        self._node.pause_writing()

    def resume_writing(self) -> None:
        self._node.resume_writing()


class _Mouth(asyncio.DatagramTransport):
    """Passes on to a socket what its node sends."""

    def __init__(self, transport: asyncio.DatagramTransport, wires: Wires) -> None:
        super().__init__()
        self._transport = transport
        self._wires = wires

    def sendto(self, data: Any, addr: Any = None) -> None:
        self._wires.traffic.datagrams_out += 1
        self._wires.traffic.datagram_bytes_out += len(data)
        if not self._wires.loses(addr):
            self._transport.sendto(data, addr)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()
