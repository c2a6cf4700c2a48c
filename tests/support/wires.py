"""Peers whose sessions meet over a network and executors that can be made to fail.

The executor is a stand-in whose next token is a plain function of all tokens so far, so what a session must
say is known without torch; the real one is compared with transformers elsewhere.
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from p2pllm.errors import BusyError, LinkError, NoRouteError, RequestError, SessionError
from p2pllm.execution import Activation, ExecutorStats, SamplingParams, StageOutput
from p2pllm.scheduling import Chain, PeerId, Stage
from p2pllm.serving.entry.generation import Generation, Generator
from p2pllm.serving.entry.request import Network
from p2pllm.serving.stage.stages import Stages
from p2pllm.transport import Failed, Message, Opened, Token
from support.bounded import BLOCKS, stats_of

LAYERS = 6
VOCABULARY = 97
EOS = 96
CONTEXT = 200
A, B, C, D = (digit * 40 for digit in "abcd")
SECRET = bytes(range(32))
GREEDY = SamplingParams(temperature=0.0)


def next_token(tokens: Sequence[int]) -> int:
    """Never EOS by itself."""
    return (sum((place + 1) * token for place, token in enumerate(tokens)) + len(tokens)) % (VOCABULARY - 1)


def expected(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def names(prefix: bytes) -> list[bytes]:
    """Those of single blocks of 16 tokens."""
    return [prefix[start : start + 8] for start in range(0, len(prefix), 8)]


def hidden_states(tokens: Sequence[int]) -> Activation:
    return Activation("float32", (len(tokens), 1), struct.pack(f"<{len(tokens)}f", *tokens))


class StandIn:
    """Passes the tokens themselves along as hidden states."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.open: dict[tuple[str, int], list[int]] = {}
        self.owners: dict[tuple[str, int], str] = {}
        self.kept: dict[tuple[str, bytes], list[int]] = {}
        self.ends: dict[tuple[str, int], int] = {}
        self.computed = 0
        """Tokens that were run, also again."""
        self.full = False
        self.most = 1000
        """Sessions."""
        self.runs_out = False
        self.fails_at: int | None = None

    def reserve(
        self, key: tuple[str, int], *, start: int, end: int, prefix: bytes, owner: str, **_: Any
    ) -> int:
        if not self.start <= start < end <= self.end:
            raise BusyError(f"layers {start}:{end} are not here")
        if self.full or len(self.open) >= self.most:
            raise BusyError("KV cache is full")
        self.owners[key] = owner
        self.ends[key] = end
        tokens: list[int] = []
        for name in names(prefix):
            tokens = self.kept.get((owner, name), tokens)
        self.open[key] = list(tokens)
        return len(tokens)

    async def run(
        self, key: tuple[str, int], position: int, inputs: list[int] | Activation, *, sample: bool
    ) -> StageOutput:
        await asyncio.sleep(0)
        if isinstance(inputs, Activation):
            inputs = list(struct.unpack(f"<{inputs.shape[0]}f", inputs.data))
        if key not in self.open:
            raise SessionError("layers 3:6 were dropped here")
        if self.runs_out:
            raise BusyError("KV cache is full")
        tokens = self.open[key]
        assert position <= len(tokens)
        tokens[position:] = [int(token) for token in inputs]
        if self.fails_at is not None and len(tokens) >= self.fails_at:
            raise SessionError("the forward pass failed: out of memory")
        self.computed += len(inputs)
        if self.ends[key] < LAYERS:
            return StageOutput(hidden_states(inputs), None)
        return StageOutput(None, next_token(tokens) if sample else None)

    async def outputs(self, key: tuple[str, int], start: int, end: int) -> Activation:
        await asyncio.sleep(0)
        assert self.ends[key] < LAYERS, "the last stage keeps none"
        assert 0 <= start < end <= len(self.open[key])
        return hidden_states(self.open[key][start:end])

    async def take_back(self, key: tuple[str, int], position: int) -> int:
        await asyncio.sleep(0)
        if key not in self.open:
            raise SessionError("layers were dropped here")
        del self.open[key][position:]
        return len(self.open[key])

    def release(self, key: tuple[str, int], prefix: bytes = b"") -> None:
        tokens = self.open.pop(key, [])
        if len(prefix) > 8 * CONTEXT // 16:
            raise RequestError("more blocks than the context has")
        for number, name in enumerate(names(prefix), 1):
            assert len(tokens) >= 16 * number, "only what was fed can be kept"
            self.kept[self.owners[key], name] = tokens[: 16 * number]

    def stats(self) -> ExecutorStats:
        return stats_of(BLOCKS)

    def drop(self) -> None:
        """Let go of all layers, and of the sessions on them."""
        self.start = self.end = LAYERS
        self.open.clear()


class Wires:
    """Peers whose frames reach each other on the loop's next turn, unless one of them is down."""

    def __init__(self, slices: dict[PeerId, tuple[int, int]]) -> None:
        self.executors = {peer: StandIn(*span) for peer, span in slices.items()}
        self.down: set[PeerId] = set()
        self.frozen: set[PeerId] = set()
        """Peers that neither do nor hear anything, while all links to them stand."""
        self._held_up: list[tuple[PeerId, PeerId, Message]] = []
        self.sent: list[tuple[PeerId, PeerId, Message]] = []
        self.tamper: Callable[[PeerId, Message], Message | None] = lambda _sender, message: message
        self.stages = {
            peer: Stages(
                own=peer,
                hidden=1,
                executor=executor,  # type: ignore[arg-type]
                send=self.sender(peer),
                drain=self.connector(peer),
                connect=self.connector(peer),
                changed=lambda: None,
            )
            for peer, executor in self.executors.items()
        }
        self.generators: dict[PeerId, Generator] = {}
        self.blamed: set[PeerId] = set()
        self.numerics = defaultdict(lambda: "float32/none")

    def sender(self, source: PeerId) -> Callable[[PeerId, Message], None]:
        def send(target: PeerId, message: Message) -> None:
            if {source, target} & self.down:
                raise LinkError(f"no link to peer {target[:8]}")
            self.sent.append((source, target, message))
            asyncio.get_running_loop().call_soon(self.deliver, source, target, message)

        return send

    def connector(self, source: PeerId) -> Callable[[PeerId], Any]:
        async def connect(target: PeerId) -> None:
            await asyncio.sleep(0)
            if {source, target} & self.down:
                raise LinkError("it does not answer")
            while source in self.frozen:
                await asyncio.sleep(0.01)

        return connect

    def deliver(self, source: PeerId, target: PeerId, message: Message) -> None:
        if {source, target} & self.frozen:
            self._held_up.append((source, target, message))
            return
        tampered = self.tamper(source, message)
        if tampered is None or {source, target} & self.down:
            return
        entry = isinstance(tampered, Opened | Failed) or (
            isinstance(tampered, Token) and tampered.stage == -1
        )
        if entry and target in self.generators:
            self.generators[target].receive(source, tampered)  # type: ignore[arg-type]
        elif not entry:
            self.stages[target].receive(source, tampered)  # type: ignore[arg-type]

    def kill(self, peer: PeerId) -> None:
        self.down.add(peer)
        for seat in self.stages[peer]._seats:
            self.stages[peer]._vacate(seat)
        for generator in self.generators.values():
            generator.peer_down(peer)
        for stages in self.stages.values():
            stages.peer_down(peer)

    def revive(self, peer: PeerId) -> None:
        """A peer that was killed is back, with nothing."""
        self.down.discard(peer)

    def thaw(self, peer: PeerId) -> None:
        """A frozen peer goes on where it was."""
        self.frozen.discard(peer)
        held_up, self._held_up = self._held_up, []
        for frame in held_up:
            self.deliver(*frame)

    def entry(self, peer: PeerId, *chains: Chain) -> Generator:
        """An entry that tries these chains in order, less those through excluded peers."""

        blamed = self.blamed

        class Routes:
            def chain(
                self,
                *,
                excluded: frozenset[PeerId],
                severed: frozenset[tuple[PeerId, PeerId]],
                fixed: Sequence[Stage] = (),
                **_: Any,
            ) -> Chain:
                for chain in chains:
                    peers = [stage.peer for stage in chain.stages]
                    hops = set(zip(peers, [*peers[1:], peers[0]], strict=True))
                    if not excluded & set(peers) and not severed & hops and set(fixed) <= set(chain.stages):
                        return chain
                raise NoRouteError(((0, LAYERS),))

            def work_s(self, _chain: Chain) -> dict[PeerId, float]:
                return {}

            def blame(self, peers: frozenset[PeerId]) -> None:
                assert all(len(peer) == 40 for peer in peers)
                blamed.update(peers)

            def trust(self, peers: frozenset[PeerId]) -> None:
                assert peers

        network = Network(
            own=peer,
            send=self.sender(peer),
            connect=self.connector(peer),
            eos=frozenset({EOS}),
            vocabulary=VOCABULARY,
            numerics=self.numerics.__getitem__,
            secret=SECRET,
        )
        self.generators[peer] = Generator(
            router=Routes(),  # type: ignore[arg-type]
            network=network,
            context=CONTEXT,
            rng=random.Random(peer),
        )
        return self.generators[peer]

    def idle(self) -> bool:
        return not any(executor.open for executor in self.executors.values())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Wires]:
        tasks = [asyncio.create_task(stages.run()) for stages in self.stages.values()]
        await asyncio.sleep(0)
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            assert self.idle(), "stopping frees everything"


def chain(*stages: tuple[PeerId, int, int]) -> Chain:
    return Chain(tuple(Stage(*stage) for stage in stages), 0.001)


async def collect(generator: Generator, prompt: Sequence[int], count: int) -> list[int]:
    request = Generation(tuple(prompt), GREEDY, count)
    async with aclosing(generator.generate(request)) as stream:
        events = [event async for event in stream]
    assert [event.final for event in events[:-1]] == [""] * (len(events) - 1)
    assert events[-1].final in ("stop", "length")
    return [event.token for event in events]


async def settled(network: Wires) -> None:
    async with asyncio.timeout(5):
        while not network.idle():
            await asyncio.sleep(0.001)
