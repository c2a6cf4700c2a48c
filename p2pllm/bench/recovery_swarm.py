"""Real peers on loopback that hold every layer twice, to be killed, frozen and brought back."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from p2pllm.bench.loopback import peer_command, shares
from p2pllm.children import Child, Children
from p2pllm.errors import P2PLLMError
from p2pllm.scheduling import PeerId
from p2pllm.serving import api_client

__all__ = ["HeldTwice", "Host", "held_twice", "slices"]

START_S: Final = 180.0
WHOLE_S: Final = 90.0
"""For a peer to come back, and for leases of what it lost to run out."""

POLL_S: Final = 0.3
IDLE_POLL_S: Final = 0.05
LOOKS: Final = 3
FRESH_S: Final = 3.0
"""A record this old is late."""

View = dict[PeerId, dict[str, Any]]


class Host:
    """A place for one peer: the same layers and identity in every life of it."""

    def __init__(self, children: Children, name: str, command: Sequence[str], layers: range) -> None:
        self.layers = layers
        self.peer: PeerId = ""
        self.url = ""
        self.address = ""
        self.idle_blocks: int | None = None
        """Free KV blocks while no session is open; None until seen."""

        self.rerouted: list[dict[str, Any]] = []
        """What it has said of sessions, as their entry, that it took elsewhere."""

        self._children = children
        self._name = name
        self._command = [*command, "--layers", f"{layers.start}:{layers.stop}"]
        self._child: Child | None = None

    async def start(self, joining: str = "") -> None:
        """Start its process, which joins through a peer at ``joining``. Raises P2PLLMError."""
        command = [*self._command, *(["--bootstrap", joining] if joining else [])]
        self._child = await self._children.start(self._name, command, on_event=self._note)
        self.idle_blocks = None
        listening = await self._child.event("peer_listening")
        self.peer, self.address = str(listening["peer"]), str(listening["addresses"])
        self.url = str((await self._child.event("api_listening"))["url"])

    def check(self) -> None:
        """Raises P2PLLMError if the process has ended."""
        if self._child is not None:
            self._child.check()

    async def freeze(self) -> None:
        """As kill -STOP."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """As kill -CONT."""
        self._signal(signal.SIGCONT)

    async def kill(self) -> None:
        """As kill -9."""
        self._signal(signal.SIGKILL)
        if self._child is not None:
            await self._child.stop()

    def _signal(self, number: signal.Signals) -> None:
        if self._child is not None:
            self._child.signal(number)

    def _note(self, event: dict[str, Any]) -> None:
        if event["event"] == "session_rerouted":
            self.rerouted.append(event)


class HeldTwice:
    """A swarm that can answer at any of its ``hosts``."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.hosts = hosts
        self.layers = max(host.layers.stop for host in hosts)

    async def start(self) -> None:
        """Start everybody. Raises P2PLLMError."""
        first, *others = self.hosts
        await first.start()
        await asyncio.gather(*(host.start(first.address) for host in others))
        await self.whole(START_S)

    async def revive(self, host: Host) -> None:
        """Start a peer that was killed. Raises P2PLLMError."""
        await host.start(next(other.address for other in self.hosts if other is not host))

    async def whole(self, limit_s: float = WHOLE_S) -> None:
        """Wait until every peer sees every other one ready and idle, with all its KV blocks free.

        Raises P2PLLMError if a peer has ended, or that takes longer than ``limit_s`` seconds.
        """
        looks = 0
        try:
            async with asyncio.timeout(limit_s):
                while looks < LOOKS:  # what a dead peer said last may look well for a moment
                    await asyncio.sleep(POLL_S)
                    looks = looks + 1 if await self._is_whole() else 0
        except TimeoutError:
            raise P2PLLMError(
                f"the swarm was not whole and idle again after {limit_s:.0f} s: {await self._state()}"
            ) from None
        for host in self.hosts:
            if host.idle_blocks is None:
                host.idle_blocks = (await view_of(host.url))[host.peer]["free_kv_blocks"]

    async def idle(self, host: Host) -> None:
        """Wait until a peer sees all KV blocks free. Raises P2PLLMError if that takes too long."""
        deadline = asyncio.get_running_loop().time() + WHOLE_S
        while self.busy(await view_of(host.url)):
            if asyncio.get_running_loop().time() > deadline:
                raise P2PLLMError(f"KV blocks stayed taken for {WHOLE_S:.0f} s: {await self._state()}")
            await asyncio.sleep(IDLE_POLL_S)

    def busy(self, view: View) -> list[Host]:
        """Who has given KV blocks away in a view, by their layers, as a chain uses them."""
        taken = [host for host in self.hosts if not _is_free(host, view)]
        return sorted(taken, key=lambda host: (host.layers.start, host.layers.stop))

    async def _is_whole(self) -> bool:
        for host in self.hosts:
            host.check()
        try:
            views = await asyncio.gather(*(view_of(host.url) for host in self.hosts))
        except P2PLLMError:  # one that is not listening yet
            return False
        ready = all(_is_ready(host, view) for view in views for host in self.hosts)
        return ready and not any(map(self.busy, views))

    async def _state(self) -> str:
        view = await view_of(self.hosts[0].url)
        busy = [host.peer[:8] for host in self.busy(view)]
        missing = [host.peer[:8] for host in self.hosts if not _is_ready(host, view)]
        return f"blocks taken at {busy}, not ready {missing}"


async def view_of(url: str) -> View:
    """What a peer says of all peers. Raises P2PLLMError."""
    async with api_client(url) as client:
        return {peer["peer"]: peer for peer in (await client.swarm())["peers"]}


def _is_free(host: Host, view: View) -> bool:
    known = host.idle_blocks is not None and host.peer in view
    return not known or view[host.peer]["free_kv_blocks"] == host.idle_blocks


def _is_ready(host: Host, view: View) -> bool:
    ready = {"start": host.layers.start, "end": host.layers.stop, "state": "ready"}
    peer = view.get(host.peer)
    return peer is not None and peer["spans"] == [ready] and peer["age_s"] < FRESH_S


def slices(layers: int, head_layers: float) -> list[range]:
    """The layers of each peer: three that share them, and three more that do just the same, the head counted
    as so many layers.

    With fewer peers two of them would hold all layers, and no chain would have a middle.
    """
    return 2 * shares(layers, head_layers)


@asynccontextmanager
async def held_twice(model: str, layers: Sequence[range]) -> AsyncIterator[HeldTwice]:
    """Start peers with these ``layers`` in float32; stop them at the end. Raises P2PLLMError."""
    with tempfile.TemporaryDirectory(prefix="p2pllm-bench-") as folder:
        command = [*peer_command(model, folder), "--dtype", "float32"]
        async with Children() as children:
            hosts = [Host(children, f"peer {number}", command, part) for number, part in enumerate(layers, 1)]
            swarm = HeldTwice(hosts)
            try:
                await swarm.start()
                yield swarm
            finally:
                for host in hosts:
                    host.thaw()
