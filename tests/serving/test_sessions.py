"""Both sides of a session against each other, over a network and an executor that can be made to fail."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
from support.wires import (
    CONTEXT,
    GREEDY,
    VOCABULARY,
    A,
    B,
    C,
    D,
    Wires,
    chain,
    collect,
    expected,
    settled,
)

from p2pllm.errors import BusyError, LinkError, NoRouteError, RequestError
from p2pllm.scheduling import Chain, PeerId
from p2pllm.serving.entry.generation import Generation
from p2pllm.transport import (
    Close,
    Failed,
    Hidden,
    Message,
    Open,
    Opened,
    Renew,
    Replay,
    Reroute,
    Resume,
    Token,
    Tokens,
    Where,
)

PROMPTS = [[5], list(range(1, 40)), [7] * 150]
CHAINS = [
    chain((A, 0, 6)),
    chain((A, 0, 2), (B, 2, 6)),
    chain((B, 0, 1), (A, 1, 4), (C, 4, 6)),
    chain((A, 0, 2), (B, 2, 3), (A, 3, 6)),
]


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
@pytest.mark.parametrize("stages", CHAINS, ids=lambda it: "-".join(stage.peer[0] for stage in it.stages))
async def test_tokens_come_round_the_ring(stages: Chain, prompt: list[int]) -> None:
    network = Wires(dict.fromkeys((A, B, C, D), (0, 6)))
    async with network.running():
        assert await collect(network.entry(D, stages), prompt, 20) == expected(prompt, 20)
        await settled(network)
        # The token goes from the last stage straight to the first; the entry sends none.
        decoded = [
            (source, target)
            for source, target, message in network.sent
            if isinstance(message, Token) and message.stage == 0
        ]
        assert decoded == [(stages.stages[-1].peer, stages.stages[0].peer)] * 19


async def test_eos_ends_the_answer() -> None:
    network = Wires({A: (0, 6)})

    def to_eos(_sender: PeerId, message: Message) -> Message:
        return replace(message, eos=(expected([5], 4)[-1],)) if isinstance(message, Open) else message

    network.tamper = to_eos
    async with network.running():
        request = Generation((5,), GREEDY, 50)
        events = [event async for event in network.entry(A, chain((A, 0, 6))).generate(request)]
        await settled(network)
    assert [event.token for event in events] == expected([5], 4)
    assert events[-1].final == "stop"


async def test_a_refusal_is_tried_elsewhere_and_leaves_nothing_reserved() -> None:
    network = Wires({A: (0, 3), B: (3, 6), C: (3, 6)})
    network.executors[B].full = True
    async with network.running():
        generator = network.entry(A, chain((A, 0, 3), (B, 3, 6)), chain((A, 0, 3), (C, 3, 6)))
        assert await collect(generator, [9], 5) == expected([9], 5)
        await settled(network)
        network.executors[C].full = True
        with pytest.raises(BusyError, match="KV cache is full"):
            await collect(generator, [9], 5)
        await settled(network)


@pytest.mark.parametrize("seed", range(5))
async def test_two_entries_that_each_have_what_the_other_wants_both_get_it(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reserves on another stage first, and there is room for one session on each."""
    monkeypatch.setattr("p2pllm.serving.entry.course.BUSY_S", 5.0)
    network = Wires({A: (0, 3), B: (3, 6), C: (0, 1), D: (0, 1)})
    network.executors[A].most = network.executors[B].most = 1
    deliver = network.deliver

    def crossed(source: PeerId, target: PeerId, message: Message) -> None:
        if isinstance(message, Open) and (source, target) in ((C, B), (D, A)):
            asyncio.get_running_loop().call_later(0.002, deliver, source, target, message)
        else:
            deliver(source, target, message)

    network.deliver = crossed  # type: ignore[method-assign]
    async with network.running():
        entries = [network.entry(peer, chain((A, 0, 3), (B, 3, 6))) for peer in (C, D)]
        for number, entry in enumerate(entries):
            entry._rng.seed(seed * 2 + number)
        answers = await asyncio.gather(*(collect(entry, [7], 5) for entry in entries))
        assert answers == [expected([7], 5)] * 2
        refused = [target for _, target, it in network.sent if isinstance(it, Failed) and it.cause == "busy"]
        assert {*refused} == {C, D}
        await settled(network)


async def test_what_was_sent_for_an_earlier_chain_is_not_computed() -> None:
    network = Wires({A: (0, 3), B: (3, 6), C: (0, 3)})
    session = "s" + D
    plan = Open(session, 1, 0, ((A, 0, 3), (B, 3, 6)), D, 16, 0.0, 1.0, 0, 0, (), 15, 60.0)
    rows = Hidden(session, 1, 0, 0, False, "float32", (2, 1), bytes(8))
    answers: list[Opened] = []

    def watch(_sender: PeerId, message: Message) -> Message | None:
        if isinstance(message, Opened):
            answers.append(message)
            return None
        return message

    network.tamper = watch
    async with network.running():
        for source, message in (
            (D, plan),
            (D, Resume(session, 1, 0, 0)),
            (A, rows),
            (D, Reroute(session, 1, 2, ((C, 0, 3), (B, 3, 6)), 1)),
            (A, rows),
            (A, replace(rows, generation=2)),
            (C, rows),
            (C, replace(rows, generation=2, position=1)),
            (D, Where(session, 1, 2)),
            (D, Resume(session, 1, 2, 1)),
            (D, Reroute(session, 1, 2, ((A, 0, 3), (B, 3, 6)), 0)),
            (D, Reroute(session, 1, 3, ((A, 0, 2), (B, 2, 6)), 0)),  # other layers: no seat of this session
            (D, Where(session, 1, 1)),
            (D, Where(session, 1, 2)),
        ):
            network.deliver(source, B, message)
            await asyncio.sleep(0.005)
        assert [(it.generation, it.held) for it in answers] == [(0, 0), (2, 1), (2, 1), (2, 3)]
        assert network.executors[B].computed == 4


async def test_a_stage_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pllm.serving.entry.course.HEAL_S", 0.1)
    network = Wires({A: (0, 3), B: (3, 6)})
    network.executors[B].fails_at = 4
    async with network.running():
        with pytest.raises(NoRouteError, match="out of memory"):
            await collect(network.entry(A, chain((A, 0, 3), (B, 3, 6))), [1, 2], 9)
        await settled(network)


async def test_a_session_whose_layers_are_dropped_goes_on_elsewhere() -> None:
    network = Wires({A: (0, 3), B: (3, 6), C: (3, 6)})
    async with network.running():
        generator = network.entry(A, chain((A, 0, 3), (B, 3, 6)), chain((A, 0, 3), (C, 3, 6)))
        tokens: list[int] = []
        async with aclosing(generator.generate(Generation((8,), GREEDY, 20))) as stream:
            async for event in stream:
                tokens.append(event.token)
                if len(tokens) == 7:
                    network.executors[B].drop()
        assert tokens == expected([8], 20)
        assert {peer for peer, target, it in network.sent if isinstance(it, Failed)} == {B}
        await settled(network)
        with pytest.raises(BusyError, match="layers 3:6 are not here"):
            await collect(network.entry(A, chain((A, 0, 3), (B, 3, 6))), [8], 2)
        await settled(network)


async def test_a_peer_that_leaves_refuses_new_sessions_and_waits_for_the_others() -> None:
    network = Wires({A: (0, 3), B: (3, 6)})
    leaving = network.stages[B]
    async with network.running():
        await asyncio.wait_for(leaving.idle(), 1)
        generator = network.entry(A, chain((A, 0, 3), (B, 3, 6)))
        async with aclosing(generator.generate(Generation((1,), GREEDY, 30))) as stream:
            tokens = [(await anext(stream)).token]
            leaving.accepting = False
            idle = asyncio.create_task(leaving.idle())
            with pytest.raises(BusyError, match="takes no new sessions: it is leaving"):
                await collect(generator, [4], 3)
            assert (leaving.sessions, idle.done()) == (1, False)
            tokens += [event.token async for event in stream]
        assert tokens == expected([1], 30)
        await asyncio.wait_for(idle, 1)
        assert leaving.sessions == 0
        leaving.accepting = True
        assert await collect(generator, [4], 3) == expected([4], 3)
        await settled(network)


async def test_closing_the_stream_frees_the_chain() -> None:
    network = Wires({A: (0, 3), B: (3, 6)})
    async with network.running():
        generator = network.entry(A, chain((A, 0, 3), (B, 3, 6)))
        async with aclosing(generator.generate(Generation((1,), GREEDY, 100))) as stream:
            await anext(stream)
            assert not network.idle()
        await settled(network)


async def test_a_session_ends_with_its_entry_and_with_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pllm.serving.stage.stages.RESERVED_S", 1.0)
    monkeypatch.setattr("p2pllm.serving.stage.stages.SWEEP_S", 0.05)
    monkeypatch.setattr("p2pllm.serving.stage.seat.ORPHANED_S", 0.2)
    network = Wires({A: (0, 6), B: (0, 1)})
    async with network.running():
        plan = Open("s1" + B, 0, 0, ((A, 0, 6),), B, 16, 0.0, 1.0, 0, 0, (), 15, 60.0)
        network.sender(B)(A, plan)
        network.sender(B)(A, replace(plan, session="s2" + B, lease_s=0.5))
        network.sender(B)(A, replace(plan, session="s3" + B))
        for session in ("s1" + B, "s2" + B):  # the entry of s3 never comes back to it
            network.sender(B)(A, Resume(session, 0, 0, 0))
        network.sender(B)(A, Renew("s3" + B))
        ended: list[str] = []
        async with asyncio.timeout(5):
            while len(network.executors[A].open) != 3:
                await asyncio.sleep(0)
            while len(ended) < 2:
                await asyncio.sleep(0.01)
                ended += {"s1", "s2", "s3"} - {key[0][:2] for key in network.executors[A].open} - {*ended}
        assert ended == ["s2", "s3"]
        network.kill(B)
        await settled(network)


async def test_open_and_close_in_one_breath_leave_no_seat() -> None:
    network = Wires({A: (0, 6), B: (0, 1)})
    async with network.running():
        plan = Open("s" + B, 0, 0, ((A, 0, 6),), B, 16, 0.0, 1.0, 0, 0, (), 15, 60.0)
        for number in range(2000):  # more than there are seats
            network.deliver(B, A, replace(plan, session=f"s{number}{B}"))
            network.deliver(B, A, Close(f"s{number}{B}"))
            await asyncio.sleep(0)
        generator = network.entry(B, chain((A, 0, 6)))
        assert await collect(generator, [4], 3) == expected([4], 3)
        await settled(network)


@pytest.mark.parametrize("told", [A, B])
async def test_a_link_that_breaks_between_two_stages_is_mended_at_once(told: PeerId) -> None:
    """Both peers live and answer; only they know that a frame between them may be lost."""
    network = Wires({A: (0, 3), B: (3, 6), C: (3, 6), D: (0, 3)})
    lost: list[Message] = []

    def drop(sender: PeerId, message: Message) -> Message | None:
        is_here = sender in (A, B) and isinstance(message, Hidden | Token) and message.generation == 0
        if is_here and message.position == 5:  # type: ignore[attr-defined]
            lost.append(message)
            return None
        return message

    network.tamper = drop
    async with network.running():
        generator = network.entry(D, chain((A, 0, 3), (B, 3, 6)), chain((D, 0, 3), (C, 3, 6)))
        task = asyncio.create_task(collect(generator, [1, 2], 12))
        async with asyncio.timeout(5):
            while not lost:
                await asyncio.sleep(0)
        network.stages[told].peer_down({A: B, B: A}[told])
        async with asyncio.timeout(1):  # far less than the deadline of a silent stage
            assert await task == expected([1, 2], 12)
        await settled(network)
    told_anew = {target for _, target, it in network.sent if isinstance(it, Open | Reroute) and it.generation}
    assert told_anew == {A, B}, "both stay"
    assert generator.recomputed_layer_tokens <= 6, "no more than what was lost"
    assert network.blamed == set()


async def test_a_link_between_an_entry_and_a_stage_that_breaks_is_mended_at_once() -> None:
    network = Wires({A: (0, 3), B: (3, 6), C: (3, 6), D: (0, 1)})
    generator = network.entry(D, chain((A, 0, 3), (B, 3, 6)), chain((A, 0, 3), (C, 3, 6)))
    tokens: list[int] = []
    async with network.running():
        async with aclosing(generator.generate(Generation((1, 2), GREEDY, 12))) as stream:
            async for event in stream:
                tokens.append(event.token)
                if len(tokens) == 5:
                    generator.peer_down(B)
                    network.stages[B].peer_down(D)
        await settled(network)
    assert tokens == expected([1, 2], 12)
    assert generator.recomputed_layer_tokens == 0
    assert not any(target == C for _, target, _ in network.sent)


async def test_a_hop_that_does_not_work_is_no_reason_to_avoid_its_ends() -> None:
    """The entry reaches both A and B, but A cannot reach B (a router between them, or a liar): A is still
    good.
    """
    network = Wires({A: (0, 3), B: (3, 6), C: (3, 6), D: (0, 1)})
    reach = network.connector(A)

    async def not_b(target: PeerId) -> None:
        if target == B:
            raise LinkError("it does not answer")
        await reach(target)

    network.stages[A]._duty._connect = not_b
    async with network.running():
        generator = network.entry(D, chain((A, 0, 3), (B, 3, 6)), chain((A, 0, 3), (C, 3, 6)))
        assert await collect(generator, [2], 6) == expected([2], 6)
        await settled(network)


async def test_hidden_states_of_another_shape_end_their_session() -> None:
    network = Wires({A: (0, 3), B: (3, 6)})
    async with network.running():
        stages = ((A, 0, 3), (B, 3, 6))
        network.deliver(A, B, Open("s" + A, 1, 0, stages, A, 16, 0.0, 1.0, 0, 0, (), 15, 60.0))
        await asyncio.sleep(0.01)
        assert not network.idle()
        network.deliver(A, B, Hidden("s" + A, 1, 0, 0, False, "float32", (1, 2), bytes(8)))
        await settled(network)


async def test_hidden_states_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pllm.serving.stage.stages.MAX_WAITING_BYTES", 4000)
    network = Wires({A: (0, 3), B: (3, 6)})
    stages = ((A, 0, 3), (B, 3, 6))
    async with network.running():
        for number in range(2):
            network.deliver(A, B, Open(f"s{number}{A}", 1, 0, stages, A, 16, 0.0, 1.0, 0, 0, (), 15, 60.0))
            network.deliver(A, B, Resume(f"s{number}{A}", 1, 0, 0))
        await asyncio.sleep(0.01)
        flood = Hidden("s0" + A, 1, 0, 0, False, "float32", (100, 1), bytes(400))
        for _ in range(11):
            network.deliver(A, B, flood)
        await asyncio.sleep(0.01)
        assert list(network.executors[B].open) == [("s1" + A, 3)], "the flood cost its own session alone"
        for _ in range(9):
            network.deliver(A, B, replace(flood, session="s1" + A))
            await asyncio.sleep(0.001)
        assert ("s1" + A, 3) in network.executors[B].open, "what was worked off does not count"


async def test_frames_from_the_wrong_peer_change_nothing() -> None:
    network = Wires({A: (0, 3), B: (3, 6), C: (0, 6)})
    async with network.running():
        generator = network.entry(A, chain((A, 0, 3), (B, 3, 6)))
        async with aclosing(generator.generate(Generation((1,), GREEDY, 40))) as stream:
            tokens = [(await anext(stream)).token]
            (session,) = {key[0] for key in network.executors[A].open}
            strangers: list[Message] = [
                Close(session),
                Tokens(session, 0, 0, 0, (9, 9), True),
                Token(session, 0, 0, 1, 5, ""),
                Failed(session, 0, 0, "broken", "nonsense"),
                Token(session, -1, 0, 1, 5, "stop"),
                Opened(session, 1, 0, 10**6),
                Reroute(session, 0, 1, ((A, 0, 3), (B, 3, 6)), 0),
                Reroute(session, 1, 1, ((C, 0, 3), (B, 3, 6)), 0),
                Resume(session, 0, 0, 0),
                Replay(session, 0, 0, C, 1, 1, 0, 1),
                Where(session, 0, 0),
                Renew(session),
            ]
            for message in strangers:
                network.sender(C)(A, message)
                network.sender(C)(B, message)
            tokens += [event.token async for event in stream]
        assert tokens == expected([1], 40)
        await settled(network)


@pytest.mark.parametrize(
    "change",
    [{"position": 0}, {"position": 10**6}, {"token": VOCABULARY}],
    ids=["replayed", "far ahead", "not in the vocabulary"],
)
async def test_impossible_tokens_are_not_believed(change: dict[str, int]) -> None:
    network = Wires({A: (0, 3), B: (3, 6), C: (3, 6)})

    def lie(sender: PeerId, message: Message) -> Message:
        is_copy = isinstance(message, Token) and message.stage == -1
        return replace(message, **change) if sender == B and is_copy else message  # type: ignore[arg-type]

    network.tamper = lie
    async with network.running():
        generator = network.entry(A, chain((A, 0, 3), (B, 3, 6)), chain((A, 0, 3), (C, 3, 6)))
        assert await collect(generator, [2], 6) == expected([2], 6)
        await settled(network)


@pytest.mark.parametrize(
    ("prompt", "count", "says"),
    [([], 5, "empty"), ([1] * CONTEXT, 1, "at most"), ([1] * 10, CONTEXT, "lower max_tokens")],
)
async def test_requests_that_can_never_succeed(prompt: list[int], count: int, says: str) -> None:
    network = Wires({A: (0, 6)})
    async with network.running():
        with pytest.raises(RequestError, match=says):
            await collect(network.entry(A, chain((A, 0, 6))), prompt, count)
        assert network.sent == []


async def test_nobody_is_served_outside_of_run() -> None:
    network = Wires({A: (0, 6)})
    generator = network.entry(A, chain((A, 0, 6)))
    with pytest.raises(BusyError, match="not serving"):
        await collect(generator, [1], 3)
