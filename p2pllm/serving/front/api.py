"""The HTTP API of a peer: OpenAI's chat completions, the list of models, health, and the swarm as JSON."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

from aiohttp import web

from p2pllm.errors import BusyError, RequestError
from p2pllm.execution import ExecutorStats
from p2pllm.serving.front.allowance import Allowances
from p2pllm.serving.front.answers import Answers, within
from p2pllm.serving.front.api_errors import errors_as_json
from p2pllm.serving.front.completion import Completer
from p2pllm.serving.front.concurrency import STRETCH
from p2pllm.serving.front.gate import QUEUE_TIMEOUT_S, Gate, Place
from p2pllm.serving.front.keys import ApiKeys, Client
from p2pllm.serving.front.metrics import METRICS_TYPE, admission_json, metrics_text
from p2pllm.serving.front.schemas import ChatBody
from p2pllm.serving.operator import Operator, is_local, operator_routes
from p2pllm.serving.status import Status

__all__ = ["Api"]

MAX_BODY = 4 * 2**20

_CLIENT = web.RequestKey("client", Client)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Api:
    """Routes and handlers. ``completer`` is None until this peer can serve."""

    def __init__(
        self,
        *,
        status: Status,
        operator: Operator,
        rng: random.Random,
        keys: ApiKeys | None = None,
        queue_timeout_s: float = QUEUE_TIMEOUT_S,
        stretch: float = STRETCH,
        engine: Callable[[], ExecutorStats] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With ``keys`` only their holders are answered, and those on this machine who ask how things are.
        ``queue_timeout_s`` is how long a request waits for its turn at most, ``stretch`` how many times what
        it is alone the time between an answer's tokens may be.
        """
        self.completer: Completer | None = None
        self.unavailable = ""
        """Why this peer answers nobody any more; empty while it does."""
        self._model = status.model
        self._status = status
        self._operator = operator
        self._rng = rng
        self._keys = keys
        self._allowances = Allowances()
        self._gate = Gate(status.outlook, timeout_s=queue_timeout_s, stretch=stretch, clock=clock)
        self._engine = engine
        self._clock = clock
        self._answers = Answers(status.model, status.stages)
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
                web.get("/metrics", self._metrics),
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
        is_about_here = (request.path == "/metrics" or request.path.startswith("/api/")) and is_local(request)
        if request.path != "/healthz" and not is_about_here:
            request[_CLIENT] = self._client(request)
        return await handler(request)

    def _client(self, request: web.Request) -> Client:
        """Who asks; HTTPUnauthorized if that takes a key, and there is no good one."""
        if self._keys is None:
            return Client.at(request.remote or "")
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
        return web.json_response(self._status.swarm() | {"admission": admission_json(self._gate)})

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
        client = request[_CLIENT]
        self._enter(client)
        place: Place | None = None
        self._answering += 1
        self._idle.clear()
        try:
            with self._gate.place(client, body.prompt_guess, body.most_tokens) as place:
                prompt = body.prompt(default_seed=self._rng.getrandbits(63))
                answer = within(body.timeout, self.completer.complete(prompt, place))
                async with aclosing(answer):
                    if not body.stream:
                        return await self._answers.plain(answer)
                    usage = body.stream_options is not None and body.stream_options.include_usage
                    return await self._answers.stream(request, answer, usage=usage)
        finally:
            spent = place.prompt + place.tokens if place is not None and place.tokens else 0
            self._allowances.leave(client, spent, self._clock())
            self._answering -= 1
            if not self._answering:
                self._idle.set()

    def _enter(self, client: Client) -> None:
        """Count a request towards what its client may have; raises BusyError."""
        try:
            self._allowances.enter(client, self._clock(), self._gate.admission.each_s())
        except BusyError:
            self._gate.admission.refused["key_limit"] += 1
            raise

    async def _metrics(self, _request: web.Request) -> web.Response:
        stats = None if self._engine is None else self._engine()
        sessions = None if self.completer is None else self.completer.generator
        text = metrics_text(self._gate, sessions, stats)
        return web.Response(body=text, headers={"Content-Type": METRICS_TYPE})


async def _json(request: web.Request) -> Any:
    try:
        return await request.json()
    # A stranger chooses the encoding, the compression and how deep it goes.
    except (ValueError, LookupError, RecursionError, web.RequestPayloadError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error
