"""A running swarm: entries, views, cancellation, loss of a peer, and what clients of the API see."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.client import answer, chat, free_blocks, swarm_of, until_ready
from support.processes import Process, api_of, swarm
from support.reference import Reference

from p2pllm.errors import P2PLLMError
from p2pllm.serving import api_client

QUESTION = "Why is the sky blue?"


async def busy(url: str, idle: dict[str, int]) -> set[str]:
    """Peers that have given KV blocks away since they were idle."""
    return {peer for peer, blocks in (await free_blocks(url)).items() if blocks < idle.get(peer, 0)}


async def test_every_peer_sees_the_same_swarm(
    idle_blocks: dict[str, int], three_peers: list[Process]
) -> None:
    apis = [api_of(peer) for peer in three_peers]
    views = [await swarm_of(url) for url in apis]
    spans = {
        (peer["peer"], span["start"], span["end"], span["state"])
        for peer in views[0]["peers"]
        for span in peer["spans"]
    }
    assert {span[1:] for span in spans} == {(0, 13, "ready"), (13, 19, "ready"), (19, 30, "ready")}
    assert {view["self"] for view in views} == set(idle_blocks)
    for view in views:
        assert {peer["peer"] for peer in view["peers"]} == {span[0] for span in spans}
        assert view["missing"] == []
        assert all(peer["tau_s"] > 0 and peer["memory_used"] > 0 for peer in view["peers"])


async def test_two_entries_at_once(three_peers: list[Process], reference: Reference) -> None:
    apis = [api_of(peer) for peer in three_peers]
    prompts = (QUESTION, "Write a haiku about rivers.")
    answers = await asyncio.gather(
        *(answer(apis[number], prompt, temperature=0, max_tokens=24) for number, prompt in enumerate(prompts))
    )
    for prompt, (_, figures) in zip(prompts, answers, strict=True):
        reference.check_greedy(prompt, figures.token_ids, limit=24)


async def test_a_client_that_goes_away_frees_the_cache_everywhere(
    idle_blocks: dict[str, int], three_peers: list[Process]
) -> None:
    url = api_of(three_peers[1])
    request = chat("Count to a thousand.")
    async with api_client(url) as client, aclosing(client.chat(request, max_tokens=2000)) as pieces:
        await anext(pieces)
        async with asyncio.timeout(10):
            while len(await busy(url, idle_blocks)) < 3:
                await asyncio.sleep(0.05)
    async with asyncio.timeout(10):
        while await free_blocks(url) != idle_blocks:
            await asyncio.sleep(0.05)
    for peer in three_peers:
        assert not peer.events("session_crashed")


async def test_plain_answers_have_openai_s_shape(three_peers: list[Process], reference: Reference) -> None:
    url = api_of(three_peers[2])
    body = {"messages": chat(QUESTION), "temperature": 0, "max_completion_tokens": 12}
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{url}/v1/models") as response:
            (model,) = (await response.json())["data"]
        async with http.post(f"{url}/v1/chat/completions", json=body | {"model": model["id"]}) as response:
            assert response.status == 200
            result = await response.json()
    (choice,) = result["choices"]
    assert (result["object"], result["model"], choice["finish_reason"]) == (
        "chat.completion",
        model["id"],
        "length",
    )
    assert choice["message"] == {
        "role": "assistant",
        "content": reference.text(result["p2pllm"]["token_ids"]),
    }
    prompt = len(reference.prompt(QUESTION))
    assert result["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 12,
        "total_tokens": prompt + 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def events_of(url: str, body: dict[str, Any]) -> list[str]:
    """The data of every server-sent event of a streamed answer."""
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/chat/completions", json=body) as response,
    ):
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        lines = (await response.text()).split("\n\n")
    assert lines.pop() == ""
    return [line.removeprefix("data: ") for line in lines]


async def test_streams_have_openai_s_shape(three_peers: list[Process]) -> None:
    url = api_of(three_peers[0])
    options = {"stream_options": {"include_usage": True}, "stream": True, "temperature": 0, "stop": " sky"}
    *chunks, done = await events_of(url, {"messages": chat(QUESTION), "max_tokens": 64} | options)
    assert done == "[DONE]"
    events = [json.loads(chunk) for chunk in chunks]
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] > 0
    reasons = [event["choices"][0]["finish_reason"] for event in events[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
    assert text == ("The answer to this question lies in the intricate dance of light and color. The"), (
        "the published beginning of transformers' greedy answer, up to the stop string"
    )


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"messages": []}, 400, None),
        ({"messages": [{"role": "user", "content": "x"}], "temperature": -1}, 400, None),
        (
            {"messages": [{"role": "user", "content": "x"}], "max_tokens": 10**6},
            400,
            "context_length_exceeded",
        ),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400, "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "x"}], "model": "other"}, 404, "not_found"),
    ],
)
async def test_errors_have_openai_s_shape(
    three_peers: list[Process], body: dict[str, Any], status: int, code: str | None
) -> None:
    url = api_of(three_peers[0])
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/chat/completions", json=body) as response,
    ):
        assert response.status == status
        error = (await response.json())["error"]
    assert error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"{", {}),
        (b"[" * 100_000, {}),
        (b"\xff\xfe{}", {}),
        (b"{}", {"Content-Type": "application/json; charset=bogus"}),
        (b"nonsense", {"Content-Encoding": "gzip"}),
        (b'{"messages": [{"role": "user", "content": "\\ud800 x"}]}', {}),
        (b'{"messages": [{"role": "user", "content": "x"}], "top_k": 1099511627776}', {}),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 2}', {}),
    ],
)
async def test_bodies_that_are_no_requests(
    three_peers: list[Process], body: bytes, headers: dict[str, str]
) -> None:
    url = f"{api_of(three_peers[0])}/v1/chat/completions"
    async with aiohttp.ClientSession() as http, http.post(url, data=body, headers=headers) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("temperature", [1e-50, 1e-6, 1e-3])
async def test_a_tiny_temperature_is_greedy_and_does_no_harm(
    three_peers: list[Process], reference: Reference, temperature: float
) -> None:
    url = api_of(three_peers[0])
    _, figures = await answer(url, QUESTION, temperature=temperature, top_k=5, top_p=0.9, max_tokens=6)
    reference.check_greedy(QUESTION, figures.token_ids, limit=6)


async def test_content_may_come_in_parts_or_be_null(three_peers: list[Process], reference: Reference) -> None:
    url = api_of(three_peers[0])
    parts = [{"type": "text", "text": "Why is the "}, {"type": "text", "text": "sky blue?"}]
    async with (
        api_client(url) as client,
        aclosing(client.chat([{"role": "user", "content": parts}], temperature=0, max_tokens=4)) as pieces,
    ):
        text = "".join([piece async for piece in pieces if isinstance(piece, str)])
    assert text == "The answer to this"
    async with api_client(url) as client:
        empty = [{"role": "user", "content": None}]
        async with aclosing(client.chat(empty, temperature=0, max_tokens=1)) as pieces:
            assert [piece async for piece in pieces]


async def test_kill_9_of_a_peer_with_a_second_holder(tmp_path: Path, reference: Reference) -> None:
    with swarm(tmp_path) as made:
        first, second, third = made.start("0:12", "12:30", "12:30")
        url = api_of(first)
        await until_ready(url)
        async with asyncio.timeout(20):
            while sum(peer["tau_s"] > 0 for peer in (await swarm_of(url))["peers"]) < 3:
                await asyncio.sleep(0.05)
        victims = {peer.event("peer_listening")["peer"]: peer for peer in (second, third)}
        # Killed in the middle of an answer: the entry goes on over the other holder, and no token changes.
        idle = await free_blocks(url)
        text, tokens = "", list[int]()
        options = {"temperature": 0, "max_tokens": 48}
        async with api_client(url) as client, aclosing(client.chat(chat(QUESTION), **options)) as pieces:
            text += await anext(pieces)
            async with asyncio.timeout(10):
                while not (used := await busy(url, idle) & set(victims)):
                    await asyncio.sleep(0.01)
            victims.pop(used.pop()).kill()
            async for piece in pieces:
                if isinstance(piece, str):
                    text += piece
                else:
                    tokens = piece.token_ids
        assert first.events("session_rerouted")
        reference.check_greedy(QUESTION, tokens, limit=48)
        assert text == reference.text(tokens)
        # The next request answers at once, though the records of the dead peer still live.
        _, figures = await answer(url, QUESTION, temperature=0, max_tokens=8)
        reference.check_greedy(QUESTION, figures.token_ids, limit=8)
        (survivor,) = victims
        assert [stage["peer"] for stage in figures.chain][1] == survivor
        # With the last holder gone the error names the layers.
        victims[survivor].kill()
        with pytest.raises(P2PLLMError, match="12:30"):
            await answer(url, QUESTION, max_tokens=8)
        async with asyncio.timeout(15):
            while len((await swarm_of(url))["peers"]) > 1:
                await asyncio.sleep(0.1)
        assert (await swarm_of(url))["missing"] == [[12, 30]]
