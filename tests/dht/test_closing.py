"""Whenever a node is told to stop, or whoever waits for it is, no socket and no task of it is left."""

from __future__ import annotations

import asyncio
import socket

import pytest
from support.dht import KEY, Network, eventually

from p2pllm.dht import DhtNode
from p2pllm.identity import Identity


def is_free(port: int) -> bool:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def cut_short(task: asyncio.Task[None], turns: int) -> None:
    """Cancel a task after so many turns of the loop."""
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("turns", range(5))
async def test_a_start_that_is_cut_short(turns: int) -> None:
    node, port = DhtNode(Identity.generate()), free_port()
    await cut_short(asyncio.create_task(node.start(["127.0.0.1"], port)), turns)
    await node.close()
    await eventually(lambda: is_free(port) and asyncio.all_tasks() == {asyncio.current_task()})


@pytest.mark.parametrize("turns", range(5))
async def test_an_end_that_is_cut_short(turns: int) -> None:
    """As by a second Ctrl-C."""
    node = DhtNode(Identity.generate())
    await node.start(["127.0.0.1"], 0)
    await cut_short(asyncio.create_task(node.close()), turns)
    if turns:  # or it has not even begun
        await eventually(lambda: is_free(node.port) and asyncio.all_tasks() == {asyncio.current_task()})
    await node.close()
    assert is_free(node.port)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("turns", range(0, 60, 6))
async def test_an_end_in_the_middle_of_everything(network: Network, turns: int) -> None:
    one = await network.node()
    await one.put(KEY, network.record(one))
    identity = Identity.generate()
    node = DhtNode(identity)
    await node.start(["127.0.0.1"], 0)

    async def live() -> None:
        await node.bootstrap([("127.0.0.1", one.port)])
        await asyncio.gather(node.put(KEY, network.record(one)), node.read(KEY), node.glance(KEY))

    living = asyncio.create_task(live())
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await node.close()
        await living  # what was asked is answered, with nothing
    assert is_free(node.port)
