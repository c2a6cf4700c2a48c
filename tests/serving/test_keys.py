"""API keys: who is let in, and how much each may have."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from p2pllm.errors import BusyError, UsageError
from p2pllm.scheduling import Chain
from p2pllm.serving.front.admission import Outlook
from p2pllm.serving.front.allowance import MAX_CLIENTS, Allowances
from p2pllm.serving.front.api import Api
from p2pllm.serving.front.completion import Finished, Text
from p2pllm.serving.front.gate import Place
from p2pllm.serving.front.keys import ApiKeys, Client

ANN, BEN = "sk-ann-0123456789", "sk-ben-0123456789"
FILE = f"""
[[keys]]
key = "{ANN}"
name = "ann"

[[keys]]
key = "{BEN}"
name = "ben"
concurrent = 1
tokens_per_minute = 60
weight = 2.5
"""
QUESTION = {"messages": [{"role": "user", "content": "hello"}]}
STATUS = SimpleNamespace(
    model="small", missing=tuple, swarm=dict, stages=lambda _: [], outlook=lambda _: Outlook()
)
DEADLINE_S = 10.0


class Completer:
    """Answers with one word, which costs 40 tokens, once it is let go."""

    def __init__(self) -> None:
        self.begun, self.go = asyncio.Event(), asyncio.Event()

    async def complete(self, prompt: object, place: Place) -> AsyncGenerator[Text | Finished]:
        self.begun.set()
        await self.go.wait()
        place.prompt, place.tokens = 39, 1
        yield Text("hi")
        yield Finished("stop", 39, 0, (7,), Chain((), 0.0), 0.1, 0.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    return path


def server_of(path: Path) -> tuple[TestServer, Completer]:
    api = Api(status=STATUS, operator=None, rng=random.Random(1), keys=ApiKeys(path))  # type: ignore[arg-type]
    api.completer = completer = Completer()  # type: ignore[assignment]
    return TestServer(api.application(), handler_cancellation=True), completer


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_only_who_has_a_key_is_answered(path: Path) -> None:
    server, completer = server_of(path)
    completer.go.set()
    async with server, aiohttp.ClientSession() as http, asyncio.timeout(DEADLINE_S):
        chat = server.make_url("/v1/chat/completions")
        for headers in (
            {},
            bearer("sk-eve-0123456789"),
            bearer(""),
            {"Authorization": ANN},
            bearer(ANN[:-1]),
        ):
            refused = await http.post(chat, json=QUESTION, headers=headers)
            assert refused.status == 401
            assert refused.headers["WWW-Authenticate"] == "Bearer"
            assert (await refused.json())["error"]["code"] == "invalid_api_key"
        assert (await http.get(server.make_url("/v1/models"))).status == 401
        assert (await http.post(chat, json=QUESTION, headers=bearer(ANN))).status == 200
        assert (
            await http.post(chat, json=QUESTION, headers={"Authorization": f"bearer  {BEN}"})
        ).status == 200
        assert (await http.get(server.make_url("/healthz"))).status == 200
        assert (await http.get(server.make_url("/api/swarm"))).status == 200, "from this machine"


async def test_limits_are_those_of_the_key(path: Path) -> None:
    server, completer = server_of(path)
    async with server, aiohttp.ClientSession() as http, asyncio.timeout(DEADLINE_S):
        chat = server.make_url("/v1/chat/completions")
        first = asyncio.ensure_future(http.post(chat, json=QUESTION, headers=bearer(BEN)))
        await completer.begun.wait()
        second = await http.post(chat, json=QUESTION, headers=bearer(BEN))
        assert second.status == 429
        assert second.headers["Retry-After"] == "1"
        others = [
            asyncio.ensure_future(http.post(chat, json=QUESTION, headers=bearer(ANN))) for _ in range(3)
        ]
        completer.go.set()
        assert (await first).status == 200
        assert [(await other).status for other in others] == [200] * 3
        assert (await http.post(chat, json=QUESTION, headers=bearer(BEN))).status == 200
        late = await http.post(chat, json=QUESTION, headers=bearer(BEN))
        assert late.status == 429
        assert (await late.json())["error"]["message"] == "ben has used its 60 tokens of this minute"


def test_a_changed_file_counts_and_a_broken_one_does_not(path: Path) -> None:
    keys = ApiKeys(path)
    keys.refresh()
    path.write_text(FILE.replace(ANN, "sk-ann-9876543210"))
    assert keys.client(ANN) == Client("ann")
    keys.refresh()
    assert keys.client(ANN) is None
    assert keys.client("sk-ann-9876543210") == Client("ann")
    path.write_text("[[keys]]")
    with pytest.raises(UsageError):
        keys.refresh()
    path.unlink()
    with pytest.raises(UsageError):
        keys.refresh()
    assert keys.client(BEN) == Client("ben", 1, 60, 2.5)
    assert keys.client(keys.own) is not None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "keys"),
        ("keys = []", "keys"),
        ("keys = 1", "keys"),
        ("not toml", "TOML"),
        ('[[keys]]\nname = "ann"', "keys.0.key"),
        ('[[keys]]\nname = "ann"\nkey = "short"', "keys.0.key"),
        (FILE + "weigth = 2", "keys.1.weigth"),
        (FILE.replace("= 60", "= 0"), "keys.1.tokens_per_minute"),
        (FILE.replace("= 2.5", "= 0"), "keys.1.weight"),
        (FILE.replace("= 2.5", "= inf"), "keys.1.weight"),
        (FILE.replace("ben", "ann"), "the same name"),
        (FILE.replace(BEN, ANN), "the same key"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_the_place(path: Path, text: str, reason: str) -> None:
    path.write_text(text)
    with pytest.raises(UsageError, match=reason):
        ApiKeys(path)
    path.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="TOML"):
        ApiKeys(path)


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:0:1:aaaa::1", "2001:db8:0:1::/64"),
        ("2001:db8:0:1:bbbb::2", "2001:db8:0:1::/64"),
        ("::ffff:192.0.2.7", "::ffff:192.0.2.7"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_without_keys_clients_are_told_apart_by_address(address: str, name: str) -> None:
    assert Client.at(address) == Client(name)


def test_tokens_come_back_at_the_rate_they_may_be_used() -> None:
    allowances, ben = Allowances(), Client("ben", tokens_per_minute=60)
    allowances.enter(ben, 0.0)
    allowances.leave(ben, 90, 0.0)
    with pytest.raises(BusyError) as refused:
        allowances.enter(ben, 10.0)
    assert refused.value.retry_after_s == pytest.approx(21.0), "20 of 30 too many, and one to use"
    with pytest.raises(BusyError):
        allowances.enter(ben, 30.0)
    allowances.enter(ben, 31.0)


def test_clients_at_many_addresses_are_forgotten_but_not_those_at_work() -> None:
    allowances, ben = Allowances(), Client("ben", concurrent=1)
    allowances.enter(ben, 0.0)
    for number in range(2 * MAX_CLIENTS):
        one = Client(f"192.0.2.{number}")
        allowances.enter(one, 0.0)
        allowances.leave(one, 1, 0.0)
    assert len(allowances._uses) <= MAX_CLIENTS + 1
    with pytest.raises(BusyError):
        allowances.enter(ben, 0.0)
