"""Nodes and strangers that are gone, with all their tasks, when a test ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from support.dht import Network, Stranger


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    """Closed at the end, and then nothing may be left of it."""
    made = Network()
    yield made
    await asyncio.gather(*(node.close() for node in made.identities))
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.fixture
async def stranger() -> AsyncIterator[Stranger]:
    transport, protocol = await asyncio.get_running_loop().create_datagram_endpoint(
        Stranger, local_addr=("127.0.0.1", 0)
    )
    yield protocol
    transport.abort()
