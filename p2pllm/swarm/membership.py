"""Keeps this peer in the network: joins it, comes back when it is lost, and remembers where good peers
are.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

import structlog

from p2pllm.config import Address, format_addresses
from p2pllm.dht import DhtNode, Held
from p2pllm.errors import ModelError, RecordError
from p2pllm.identity import Identity
from p2pllm.records import (
    MAX_DIRECTORY_BITS,
    SwarmBody,
    SwarmKey,
    directory_key,
    leader_key,
    swarm_id,
    swarms_keys,
)
from p2pllm.state import MAX_PEERS

__all__ = ["Membership", "Memory"]

RETRY_FIRST_S: Final = 1.0
RETRY_MAX_S: Final = 15.0
SEEK_S: Final = 10.0
SOUGHT: Final = 3
"""Lost addresses that are knocked at each time."""

FIRST_SAVE_S: Final = 5.0
SAVE_S: Final = 60.0
READ_DEADLINE_S: Final = 2.0

log = structlog.get_logger()


class Memory(Protocol):
    """What is kept on disk between runs."""

    epoch: int
    """The highest epoch of any leader seen."""
    seq: int
    """The last sequence number of this peer's records."""
    peers: Sequence[Address]
    """Addresses of good peers, best first."""

    def save(self) -> None:
        """Write it. Blocks."""


class Membership:
    """This peer's place in the network. ``arrived`` is set once it has been there, or founds it."""

    def __init__(
        self,
        *,
        identity: Identity,
        dht: DhtNode,
        swarm: bytes,
        secret: SwarmKey | None,
        model: SwarmBody,
        bootstrap: Sequence[Address],
        new_swarm: bool,
        memory: Memory,
        seq: Callable[[], int],
        others: Callable[[], Iterable[Address]],
        rng: random.Random,
    ) -> None:
        """``seq`` is the number to keep on disk; ``others`` gives the addresses of the peers of the view, to
        come back through them.
        """
        self._node_id = identity.node_id
        self._dht = dht
        self._swarm = swarm
        self._secret = secret
        self._model = model
        self._bootstrap = tuple(bootstrap)
        self._new_swarm = new_swarm
        self._memory = memory
        self._seq = seq
        self._others = others
        self._rng = rng
        self._through: Sequence[Address] = ()  # the addresses by which it joined
        self._is_new = asyncio.Event()
        self.arrived = asyncio.Event()

    async def join(self) -> None:
        """Try once. Raises ModelError when the network that answered serves other models only.

        A peer that was given nobody to join through founds a network, unless those it remembers answer.
        """
        for addresses in (self._bootstrap, tuple(self._memory.peers)):
            if addresses and await self._dht.bootstrap(addresses):
                log.info(
                    "bootstrap_joined",
                    addresses=format_addresses(addresses[:1]),
                    contacts=len(self._dht.contacts()),
                )
                self._through = addresses
                if not self.arrived.is_set():
                    await self.check_model()
                self.arrived.set()
                return
        if not self._bootstrap:
            self.arrived.set()

    async def stay(self) -> None:
        """Join again whenever nobody is left, and look for those who were lost, for ever.

        A network that was cut in two long enough to forget the other half grows together again because each
        half goes on knocking at the addresses where it once found somebody.
        """
        delay = RETRY_FIRST_S
        while True:
            if self._dht.contacts():
                delay = RETRY_FIRST_S
                await asyncio.sleep(SEEK_S * self._rng.uniform(0.75, 1.25))
                await self._seek()
                continue
            if self._bootstrap:
                log.warning(
                    "bootstrap_unreachable", addresses=format_addresses(self._bootstrap), retry_in_s=delay
                )
            await asyncio.sleep(delay)
            delay = min(2 * delay, RETRY_MAX_S)
            await self.join()
            if not self._dht.contacts():
                await self._dht.bootstrap(list(itertools.islice(self._others(), 64)))

    async def _seek(self) -> None:
        known = {contact.address for contact in self._dht.contacts()}
        lost = [
            address
            for address in dict.fromkeys([*self._bootstrap, *self._memory.peers])
            if address not in known
        ]
        await self._dht.bootstrap(self._rng.sample(lost, min(len(lost), SOUGHT)))

    async def remember(self) -> None:
        """Keep what is worth keeping on disk, now and then and whenever the epoch is another one."""
        delay = FIRST_SAVE_S
        while True:
            try:
                async with asyncio.timeout(delay):
                    await self._is_new.wait()
            except TimeoutError:
                delay = SAVE_S
            self._is_new.clear()
            await self.save()

    async def save(self) -> None:
        """Keep it on disk now. Those who do not answer now may do so again, so they are kept behind those who
        do.
        """
        self._memory.peers = list(dict.fromkeys([*self._dht.good(), *self._memory.peers]))[:MAX_PEERS]
        self._memory.seq = self._seq()
        await asyncio.to_thread(self._memory.save)

    def epoch(self, epoch: int) -> None:
        """Leaders have come as far as ``epoch``."""
        if epoch > self._memory.epoch:
            self._memory.epoch = epoch
            self._is_new.set()

    async def other_models(self) -> list[str]:
        """The names of the models that other swarms of the network serve, private ones left out."""
        served, _ = await self._index()
        return sorted({body.model for swarm, body in served.items() if swarm != self._swarm})

    async def check_model(self) -> None:
        """Raise ModelError if the network has swarms but none for this peer, unless it is to found one.

        So a mistyped --model founds no second swarm unnoticed. Whoever joined nobody founds its own network,
        and strangers that come to it have no say in that.
        """
        if self._new_swarm or not self._through:
            return
        (served, hidden), claims = await asyncio.gather(self._index(), self._read(leader_key(self._swarm)))
        if claims or self._swarm in served or self._swarm in hidden or not (served or hidden):
            return
        # It may just have no leader. Then it still has a directory, cut we do not know how.
        all_bits = range(MAX_DIRECTORY_BITS + 1)
        keys = [directory_key(self._swarm, self._node_id, bits) for bits in all_bits]
        if any(await asyncio.gather(*(self._read(key) for key in keys))):
            return
        network = f"the network at {format_addresses(self._through[:1])}"
        own = f"{self._model.model} ({self._model.fingerprint[:8]})"
        if self._secret is not None:
            raise ModelError(
                f"{network} has no swarm that serves {own} with this key: pass the same --model and "
                "--swarm-key-file as its other peers, or --new-swarm to found one"
            )
        if not served:
            raise ModelError(
                f"{network} has private swarms only: pass the --swarm-key-file of yours, or --new-swarm to "
                f"serve {own} to everybody"
            )
        names = ", ".join(sorted(f"{body.model} ({body.fingerprint[:8]})" for body in served.values()))
        more = ", and private swarms, which take --swarm-key-file" if hidden else ""
        raise ModelError(
            f"{network} serves {names}{more}, not {own}: pass the same --model, or --new-swarm to serve it "
            "too"
        )

    async def _index(self) -> tuple[dict[bytes, SwarmBody], set[bytes]]:
        """The public swarms of the network, and the ids of the private ones."""
        served: dict[bytes, SwarmBody] = {}
        hidden: set[bytes] = set()
        for found in await asyncio.gather(*(self._read(key) for key in swarms_keys())):
            for record, _ in found:
                try:
                    body = record.body()
                except RecordError:
                    hidden.add(record.swarm)
                    continue
                # Anybody can put anything there, but only what a model's own swarm says of it counts.
                if isinstance(body, SwarmBody) and record.swarm == swarm_id(body.fingerprint):
                    served[record.swarm] = body
        return served, hidden

    async def _read(self, key: bytes) -> list[Held]:
        try:
            async with asyncio.timeout(READ_DEADLINE_S):
                return await self._dht.read(key)
        except TimeoutError:
            return []
