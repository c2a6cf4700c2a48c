"""Swarms of real processes that several tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.client import free_blocks, until_ready
from support.processes import Process, api_of, swarm


@pytest.fixture(scope="module")
def three_peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Process]]:
    """Three peers with uneven slices of the embedded model, in fp32, that can answer."""
    with swarm(tmp_path_factory.mktemp("three")) as made:
        peers = made.start("0:13", "13:19", "19:30")
        asyncio.run(until_ready(*map(api_of, peers)))
        yield peers


@pytest.fixture(scope="module")
def idle_blocks(three_peers: list[Process]) -> dict[str, int]:
    """Free KV blocks of each of the three peers before anybody asked anything."""
    return asyncio.run(free_blocks(api_of(three_peers[0])))
