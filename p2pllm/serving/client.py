"""A client of a peer's HTTP API: what ``status``, ``chat``, the REPL and ``demo`` talk through."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from p2pllm.errors import P2PLLMError, SessionError
from p2pllm.serving.operator import OPERATOR_HEADER

__all__ = ["Answer", "ApiClient", "Figures", "api_client"]

Json = dict[str, Any]

CONNECT_DEADLINE_S = 5.0
SILENCE_DEADLINE_S = 600.0
MAX_LINE = 2**20


@dataclass(frozen=True, slots=True)
class Figures:
    """What an answer took: the peer's own measurement."""

    token_ids: list[int]
    chain: list[Json]
    ttft_s: float
    tokens_per_s: float

    def line(self) -> str:
        """One line for people."""
        stages = " → ".join(
            f"{stage['peer'][:8]} {stage['start']}:{stage['end']} ({stage['region']})" for stage in self.chain
        )
        speed = f"first after {self.ttft_s:.2f} s · {self.tokens_per_s:.1f} tok/s"
        return f"{len(self.token_ids)} tokens · {speed} · {stages}"


Answer = str | Figures
"""A piece of text, or at the end the figures."""


class ApiClient:
    """One peer's API. Use through ``api_client``."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self.url = url

    async def swarm(self) -> Json:
        """``/api/swarm``. Raises P2PLLMError."""
        return await self._get("/api/swarm")

    async def cluster(self, *, planned: bool = False) -> Json:
        """``/api/cluster``: the swarm as a CLUSTER.json; ``planned``: as it was when the peer, which must be
        the leader, last placed it. Raises P2PLLMError.
        """
        return await self._get("/api/cluster?planned=1" if planned else "/api/cluster")

    async def _get(self, path: str) -> Json:
        try:
            async with self._http.get(f"{self.url}{path}") as response:
                return await self._checked(response)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error

    async def operate(self, command: str, *, force: bool = False) -> None:
        """Give the peer an operator command. Raises P2PLLMError."""
        url, params = f"{self.url}/api/{command}", {"force": "1"} if force else {}
        try:
            async with self._http.post(url, headers={OPERATOR_HEADER: "1"}, params=params) as response:
                await self._checked(response)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error

    async def ready(self) -> bool:
        """Whether the peer can answer requests now; False also when it cannot be reached."""
        try:
            async with self._http.get(f"{self.url}/healthz") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def chat(self, messages: Sequence[Json], **options: Any) -> AsyncGenerator[Answer]:
        """Stream one answer: text pieces, then ``Figures``. Closing the generator cancels the request.

        Raises: P2PLLMError with the peer's own words; SessionError when the answer broke off.
        """
        body = {"messages": list(messages), "stream": True} | options
        try:
            async with self._http.post(f"{self.url}/v1/chat/completions", json=body) as response:
                if response.status != 200:
                    await self._checked(response)
                async for event in _events(response):
                    if "error" in event:
                        raise SessionError(event["error"]["message"])
                    for choice in event["choices"]:
                        if choice["delta"].get("content"):
                            yield choice["delta"]["content"]
                    if "p2pllm" in event:
                        yield Figures(**event["p2pllm"])
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error

    async def _checked(self, response: aiohttp.ClientResponse) -> Json:
        try:
            body: Json = await response.json()
        except (aiohttp.ContentTypeError, ValueError) as error:
            raise P2PLLMError(f"{self.url} is not the API of a p2pllm peer: check --api") from error
        if response.status != 200:
            raise P2PLLMError(
                str(body.get("error", {}).get("message", f"{self.url} answered {response.status}"))
            )
        return body

    def _unreachable(self, error: Exception) -> P2PLLMError:
        if isinstance(error, aiohttp.InvalidURL):
            return P2PLLMError(f"{self.url} is no URL: write --api http://host:port")
        return P2PLLMError(f"no peer answers at {self.url}: start one, or pass its --api URL")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Json]:
    """The server-sent events of a response up to ``[DONE]``."""
    async for line in response.content:
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            return
        if data:
            yield json.loads(data)
    raise SessionError("the peer closed the connection in the middle of the answer")


@asynccontextmanager
async def api_client(url: str, key: str = "") -> AsyncIterator[ApiClient]:
    """Connects to the API at ``url`` (http://host:port), with an API key where it takes one."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_DEADLINE_S, sock_read=SILENCE_DEADLINE_S)
    async with aiohttp.ClientSession(timeout=timeout, read_bufsize=MAX_LINE, headers=headers) as http:
        yield ApiClient(http, (url if "://" in url else f"http://{url}").rstrip("/"))
