"""A swarm that places itself: nobody says who holds which layers, and peers come, go, and are killed."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from support.client import answer, chat, free_blocks, swarm_of, until_ready
from support.processes import Process, api_of, swarm
from support.reference import Reference

from p2pllm.cluster import parse_cluster
from p2pllm.scheduling import place
from p2pllm.serving import Figures, api_client

QUESTION = "Why is the sky blue?"
LONG: dict[str, Any] = {"temperature": 0, "max_tokens": 120}
Span = tuple[int, int]


def ready_spans(seen: dict[str, Any]) -> dict[str, list[Span]]:
    """What every peer is ready to serve."""
    return {
        peer["peer"]: [(span["start"], span["end"]) for span in peer["spans"] if span["state"] == "ready"]
        for peer in seen["peers"]
    }


async def until(url: str, true: Any, deadline_s: float = 60) -> dict[str, Any]:
    """Poll the swarm as a peer sees it until it is as wanted; the deadline only bounds a failure."""
    async with asyncio.timeout(deadline_s):
        while not true(seen := await swarm_of(url)):
            await asyncio.sleep(0.05)
    return seen


def id_of(peer: Process) -> str:
    return str(peer.event("peer_listening")["peer"])


async def planned(made: Sequence[Process]) -> tuple[dict[str, Any], dict[str, Span]]:
    """The swarm's plan, and what Phase 1 makes offline of the facts that its leader had."""
    leader = (await swarm_of(api_of(made[0])))["leader"]
    url = next(api_of(peer) for peer in made if id_of(peer) == leader)
    async with api_client(url) as client:
        cluster = parse_cluster(json.dumps(await client.cluster(planned=True)))
        seen = await client.swarm()
    plan = place(cluster.layers, cluster.offers, cluster.network, goal=cluster.goal, today=cluster.today)
    assert (seen["plan"]["replicas"], seen["plan"]["stages"]) == (plan.k, plan.stages)
    assert seen["plan"]["z"] == pytest.approx(plan.z, rel=1e-5)
    return seen, {piece.peer: (piece.start, piece.end) for piece in plan.assignment.slices}


async def test_peers_place_themselves_and_heal(tmp_path: Path, reference: Reference) -> None:
    with swarm(tmp_path) as made:
        # In float32 a layer of the model has 14 MB and each end 113 MB: any two of these hold it.
        peers = [made.join("--memory", memory) for memory in ("430MiB", "470MiB")]
        url = api_of(peers[0])
        await until_ready(url, api_of(peers[1]))
        seen, offline = await planned(peers)
        assert {p["peer"]: (p["start"], p["end"]) for p in seen["plan"]["slices"]} == offline
        await until(url, lambda seen: ready_spans(seen) == {peer: [span] for peer, span in offline.items()})
        _, figures = await answer(api_of(peers[1]), QUESTION, temperature=0, max_tokens=16)
        reference.check_greedy(QUESTION, figures.token_ids, limit=16)

        # Two more join where layers are lightest; nobody else moves, or loads anything again.
        loads = [len(peer.events("loading")) for peer in peers]
        more = [made.join("--memory", "430MiB") for _ in range(2)]
        for peer in more:
            peer.event("ready")
        seen = await until(url, lambda seen: min(holders_of(seen).values()) == 2)
        after = ready_spans(seen)
        assert {peer: [span] for peer, span in offline.items()}.items() <= after.items()
        assert [len(peer.events("loading")) for peer in peers] == loads

        # The leader dies. Another takes over, with a higher epoch, and nobody moves.
        before = await swarm_of(api_of(more[0]))
        everyone = {id_of(peer): peer for peer in [*peers, *more]}
        leader = everyone[before["leader"]]
        survivors = [peer for peer in everyone.values() if peer is not leader]
        leader.kill()
        urls = [api_of(peer) for peer in survivors]
        for url in urls:
            seen = await until(url, lambda seen: seen["leader"] in map(id_of, survivors))
            assert seen["epoch"] > before["epoch"]
        assert len({(await swarm_of(url))["leader"] for url in urls}) == 1
        _, figures = await answer(urls[0], QUESTION, temperature=0, max_tokens=16)
        reference.check_greedy(QUESTION, figures.token_ids, limit=16)
        for peer in survivors:
            assert not peer.events("dropped")

        # One leaves on request: it hands its layers over first, so the swarm answers all the while.
        leaving = survivors[0]
        async with api_client(api_of(leaving)) as client:
            await client.operate("leave")
        while leaving.popen.poll() is None:
            _, figures = await answer(urls[1], QUESTION, temperature=0, max_tokens=4)
            reference.check_greedy(QUESTION, figures.token_ids, limit=4)
        assert leaving.popen.returncode == 0
        seen = await until(urls[1], lambda seen: len(seen["peers"]) == 2)
        assert seen["missing"] == []


async def test_pause_and_resume(tmp_path: Path, reference: Reference) -> None:
    with swarm(tmp_path) as made:
        first = made.join("--memory", "1GiB")
        await until_ready(api_of(first))
        second = made.join("--memory", "1GiB")
        second.event("ready")
        url, peers = api_of(second), {id_of(peer): peer for peer in (first, second)}
        await until(url, lambda seen: len(ready_spans(seen)) == 2 and all(ready_spans(seen).values()))
        idle = await free_blocks(url)

        # Who pauses hands over the answer that it is making.
        figures, paused = None, ""
        async with api_client(url) as client, aclosing(client.chat(chat(QUESTION), **LONG)) as answering:
            async for piece in answering:
                if isinstance(piece, Figures):
                    figures = piece
                elif not paused:
                    seen = await until(url, lambda seen: busy_in(seen, idle))
                    paused = busy_in(seen, idle)[0]
                    await operate(peers[paused], "pause")
        (staying,) = peers.keys() - {paused}
        assert figures is not None
        assert [stage["peer"] for stage in figures.chain] == [staying]
        reference.check_greedy(QUESTION, figures.token_ids, limit=LONG["max_tokens"])
        assert {event["cause"] for event in second.events("stage_lost")} == {"leaving"}

        await until(url, lambda seen: peer_in(seen, paused)["paused"])
        await until(url, lambda seen: not peer_in(seen, paused)["spans"])
        text, _ = await answer(url, QUESTION, temperature=0, max_tokens=8)
        assert text
        await operate(peers[paused], "resume")
        seen = await until(url, lambda seen: peer_in(seen, paused)["tau_s"] > 0)
        assert seen["missing"] == []


def busy_in(seen: dict[str, Any], idle: dict[str, int]) -> list[str]:
    """Who has fewer free KV blocks than when nobody asked for anything."""
    return [peer["peer"] for peer in seen["peers"] if peer["free_kv_blocks"] < idle[peer["peer"]]]


async def operate(peer: Process, command: str) -> None:
    async with api_client(api_of(peer)) as client:
        await client.operate(command)


def peer_in(seen: dict[str, Any], peer: str) -> dict[str, Any]:
    return next(entry for entry in seen["peers"] if entry["peer"] == peer)


@pytest.mark.slow
async def test_six_unlike_peers_survive_one_loss_after_another(tmp_path: Path, reference: Reference) -> None:
    """Kill the leader, a sole holder, a second holder; add peers. Prints what each took."""
    sizes = ("420MiB", "450MiB", "480MiB", "520MiB", "560MiB", "600MiB")
    with swarm(tmp_path) as made:
        peers = {}
        for size in sizes:
            process = made.join("--memory", size)
            peers[id_of(process)] = process
        await until_ready(*map(api_of, peers.values()))
        url = api_of(next(iter(peers.values())))
        await until(url, lambda seen: sum(peer["tau_s"] > 0 for peer in seen["peers"]) == len(sizes))
        await replan(url)
        seen, offline = await planned(list(peers.values()))
        assert (seen["plan"]["replicas"], len(offline)) >= (2, 6)

        async def lose(victim: str, what: str) -> None:
            process = peers.pop(victim)
            entry = api_of(next(iter(peers.values())))
            process.kill()
            began = time.monotonic()
            await until_answered(entry)
            print(f"{what}: first answer after {time.monotonic() - began:.2f} s")
            await until(entry, lambda seen: {peer["peer"] for peer in seen["peers"]} == set(peers))

        async def until_answered(entry: str) -> None:
            async with asyncio.timeout(60):
                while True:
                    try:
                        _, figures = await answer(entry, QUESTION, temperature=0, max_tokens=8)
                    except Exception:
                        await asyncio.sleep(0.05)
                        continue
                    reference.check_greedy(QUESTION, figures.token_ids, limit=8)
                    return

        async def current() -> dict[str, Any]:
            return await swarm_of(api_of(next(iter(peers.values()))))

        await lose((await current())["leader"], "the leader killed")
        await lose(await second_holder(await current()), "a holder with a second one killed")
        while (sole := sole_holder(await current())) is None:
            await lose(await second_holder(await current()), "another one killed")
        await lose(sole, "a sole holder killed")
        process = made.join("--memory", "600MiB")
        process.event("ready")
        peers[id_of(process)] = process
        await until_answered(api_of(process))
        assert (await current())["missing"] == []


async def replan(url: str) -> None:
    """Ask for a new placement, and wait until it is in force."""
    number = (await swarm_of(url))["plan"]["number"]
    async with api_client(url) as client:
        await client.operate("replan", force=True)

    def in_force(seen: dict[str, Any]) -> bool:
        plan = {piece["peer"]: (piece["start"], piece["end"]) for piece in seen["plan"]["slices"]}
        held = {
            peer["peer"]: [(span["start"], span["end"]) for span in peer["spans"]] for peer in seen["peers"]
        }
        return seen["plan"]["number"] > number and held == {peer: [span] for peer, span in plan.items()}

    await until(url, in_force)


def holders_of(seen: dict[str, Any]) -> Counter[int]:
    """How many peers are ready to serve each layer."""
    count = Counter(dict.fromkeys(range(30), 0))
    for peer in seen["peers"]:
        for span in peer["spans"]:
            if span["state"] == "ready":
                count.update(range(span["start"], span["end"]))
    return count


def layers_of(seen: dict[str, Any]) -> dict[str, set[int]]:
    return {
        peer["peer"]: {layer for span in peer["spans"] for layer in range(span["start"], span["end"])}
        for peer in seen["peers"]
    }


async def second_holder(seen: dict[str, Any]) -> str:
    """A peer all of whose layers have another holder."""
    held = layers_of(seen)
    return next(
        peer
        for peer, layers in held.items()
        if layers <= set().union(*(other for name, other in held.items() if name != peer))
    )


def sole_holder(seen: dict[str, Any]) -> str | None:
    """A peer that alone holds some layer, if there is one."""
    held = layers_of(seen)
    return next(
        (
            peer
            for peer, layers in held.items()
            if layers - set().union(*(other for name, other in held.items() if name != peer))
        ),
        None,
    )
