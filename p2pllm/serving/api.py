"""The HTTP API of a peer: OpenAI's chat completions, the list of models, health, and the swarm as JSON."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import structlog
from aiohttp import web

from p2pllm.errors import P2PLLMError, RequestError
from p2pllm.serving.allowance import Allowances
from p2pllm.serving.api_errors import error_body, errors_as_json
from p2pllm.serving.completion import Completer, Finished, Text
from p2pllm.serving.keys import ApiKeys, Client
from p2pllm.serving.operator import Operator, is_local, operator_routes
from p2pllm.serving.schemas import ChatBody
from p2pllm.serving.status import Status

__all__ = ["Api"]

MAX_BODY = 4 * 2**20

_CLIENT = web.RequestKey("client", Client)

log = structlog.get_logger()

Json = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Api:
    """Routes and handlers. ``completer`` is None until this peer can serve."""

    def __init__(
        self, *, status: Status, operator: Operator, rng: random.Random, keys: ApiKeys | None = None
    ) -> None:
        """With ``keys`` only their holders are answered, and those on this machine who ask how things are."""
        self.completer: Completer | None = None
        self.unavailable = ""
        """Why this peer answers nobody any more; empty while it does."""
        self._model = status.model
        self._status = status
        self._operator = operator
        self._rng = rng
        self._keys = keys
        self._allowances = Allowances()
        self._started = int(time.time())
        self._answering = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def application(self) -> web.Application:
        """The aiohttp application with all routes."""
        app = web.Application(client_max_size=MAX_BODY, middlewares=[errors_as_json, self._authorize])
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.get("/v1/models", self._models),
                web.get("/healthz", self._health),
                web.get("/api/swarm", self._view),
                web.get("/api/cluster", self._cluster_file),
                *operator_routes(self._operator),
            ]
        )
        return app

    async def idle(self) -> None:
        """Wait until no answer is on its way to a client."""
        await self._idle.wait()

    @web.middleware
    async def _authorize(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        is_about_here = request.path.startswith("/api/") and is_local(request)
        if request.path != "/healthz" and not is_about_here:
            request[_CLIENT] = self._client(request)
        return await handler(request)

    def _client(self, request: web.Request) -> Client:
        """Who asks; HTTPUnauthorized if that takes a key, and there is no good one."""
        if self._keys is None:
            return Client(request.remote or "")
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        client = self._keys.client(key.strip()) if scheme.lower() == "bearer" else None
        if client is None:
            raise web.HTTPUnauthorized(text="this needs an API key: send Authorization: Bearer KEY")
        return client

    async def _health(self, _request: web.Request) -> web.Response:
        """200 once requests can be answered from here, 503 while the swarm does not cover the model."""
        missing = self._status.missing()
        ready = self.completer is not None and not missing and not self.unavailable
        status = "leaving" if self.unavailable else "ok" if ready else "starting"
        body = {"status": status, "missing": missing}
        return web.json_response(body, status=200 if ready else 503)

    async def _view(self, _request: web.Request) -> web.Response:
        return web.json_response(self._status.swarm())

    async def _cluster_file(self, request: web.Request) -> web.Response:
        return web.json_response(self._status.cluster(planned=request.query.get("planned") == "1"))

    async def _models(self, _request: web.Request) -> web.Response:
        """The model of this swarm, then those that other swarms of the network serve."""
        owners = {self._model: "p2pllm"}
        for name in await self._status.other_models():
            owners.setdefault(name, "another swarm")
        models = [
            {"id": name, "object": "model", "created": self._started, "owned_by": owner}
            for name, owner in owners.items()
        ]
        return web.json_response({"object": "list", "data": models})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = ChatBody.model_validate(await _json(request))
        if body.model not in (None, "", self._model):
            raise web.HTTPNotFound(
                text=f"the model {body.model!r} does not exist here: this swarm serves {self._model!r}"
            )
        if self.completer is None or self.unavailable:
            reason = self.unavailable or "this peer is still starting: try again shortly"
            raise web.HTTPServiceUnavailable(text=reason)
        client, use = request[_CLIENT], _Use()
        self._allowances.enter(client, time.monotonic())
        answer = use.of(self.completer.complete(body.prompt(default_seed=self._rng.getrandbits(63))))
        self._answering += 1
        self._idle.clear()
        try:
            async with aclosing(answer):
                return await (self._stream(request, body, answer) if body.stream else self._plain(answer))
        finally:
            self._allowances.leave(client, use.tokens, time.monotonic())
            self._answering -= 1
            if not self._answering:
                self._idle.set()

    async def _plain(self, answer: AsyncGenerator[Text | Finished]) -> web.Response:
        text, finished = "", None
        async for event in answer:
            if isinstance(event, Finished):
                finished = event
            else:
                text += event.text
        if finished is None:
            raise RuntimeError("the answer ended without its end")
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": finished.reason,
            "logprobs": None,
        }
        return web.json_response(
            self._envelope("chat.completion")
            | {"choices": [choice], "usage": _usage(finished), "p2pllm": self._figures(finished)}
        )

    async def _stream(
        self, request: web.Request, body: ChatBody, answer: AsyncGenerator[Text | Finished]
    ) -> web.StreamResponse:
        # Errors that come before the first token still get a proper status.
        event = await anext(answer)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        envelope = self._envelope("chat.completion.chunk")
        usage = body.stream_options is not None and body.stream_options.include_usage

        def chunk(delta: Json, reason: str | None = None, **more: Any) -> Json:
            choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
            return envelope | {"choices": [choice]} | ({"usage": None} if usage else {}) | more

        async def write(data: Json) -> None:
            await response.write(b"data: " + json.dumps(data).encode() + b"\n\n")

        await write(chunk({"role": "assistant", "content": ""}))
        try:
            while isinstance(event, Text):
                await write(chunk({"content": event.text}))
                event = await anext(answer)
            await write(chunk({}, event.reason, p2pllm=self._figures(event)))
            if usage:
                await write(envelope | {"choices": [], "usage": _usage(event)})
        except ConnectionResetError:
            raise  # nobody is there to tell
        except Exception as error:
            # The status went out with the first event: all that is left is to say so in the stream.
            log.warning("answer_broke_off", reason=str(error), exc_info=not isinstance(error, P2PLLMError))
            await write(error_body(error))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _envelope(self, kind: str) -> Json:
        return {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": self._model,
        }

    def _figures(self, finished: Finished) -> Json:
        """Our extension of the answer: the chain that made it and how fast."""
        return {
            "token_ids": list(finished.token_ids),
            "chain": self._status.stages(finished.chain),
            "ttft_s": round(finished.ttft_s, 4),
            "tokens_per_s": round(finished.tokens_per_s, 2),
        }


class _Use:
    """Counts what an answer took. One that breaks off counts for what was said of it."""

    def __init__(self) -> None:
        self.tokens = 0

    async def of(self, answer: AsyncGenerator[Text | Finished]) -> AsyncGenerator[Text | Finished]:
        """The same answer, counted as it comes."""
        async with aclosing(answer):
            async for event in answer:
                if isinstance(event, Finished):
                    self.tokens = event.prompt_tokens + len(event.token_ids)
                else:
                    self.tokens += 1
                yield event


def _usage(finished: Finished) -> Json:
    completion = len(finished.token_ids)
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": finished.prompt_tokens + completion,
    }


async def _json(request: web.Request) -> Any:
    try:
        return await request.json()
    # A stranger chooses the encoding, the compression and how deep it goes.
    except (ValueError, LookupError, RecursionError, web.RequestPayloadError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error
