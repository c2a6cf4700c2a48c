"""Answers in OpenAI's shape: one JSON object, or server-sent events as the text comes.

An answer that breaks off keeps what was said. A stream says the error in a last event ``{"error": …}`` before
``[DONE]``; without a stream the client gets the error's status, and ``partial`` in its body.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import structlog
from aiohttp import web

from p2pllm.errors import P2PLLMError, SessionError
from p2pllm.scheduling import Chain
from p2pllm.serving.front.api_errors import error_body, error_response
from p2pllm.serving.front.completion import Finished, Text

__all__ = ["Answers", "within"]

Json = dict[str, Any]

log = structlog.get_logger()


async def within(
    timeout_s: float | None, answer: AsyncGenerator[Text | Finished]
) -> AsyncGenerator[Text | Finished]:
    """The same answer; SessionError, and the answer is closed, when all of it takes longer."""
    end = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    async with aclosing(answer):
        while True:
            try:
                async with asyncio.timeout_at(end):
                    event = await anext(answer)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                raise SessionError(f"the answer took longer than its timeout of {timeout_s:g} s") from error
            yield event


class Answers:
    """Writes answers of one model. ``stages`` describes a chain for people."""

    def __init__(self, model: str, stages: Callable[[Chain], Sequence[Json]]) -> None:
        self._model = model
        self._stages = stages

    async def plain(self, answer: AsyncGenerator[Text | Finished]) -> web.Response:
        """The whole answer at once. Raises P2PLLMError where nothing was said before it."""
        text, finished = "", None
        try:
            async for event in answer:
                if isinstance(event, Finished):
                    finished = event
                else:
                    text += event.text
        except P2PLLMError as error:
            if not text:
                raise
            log.warning("answer_broke_off", reason=str(error))
            return error_response(error, partial=text)
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

    async def stream(
        self, request: web.Request, answer: AsyncGenerator[Text | Finished], *, usage: bool
    ) -> web.StreamResponse:
        """The answer as it comes, with ``usage`` also an event of what it took. Raises what
        comes before the first piece.
        """
        # Errors that come before the first token still get a proper status.
        event = await anext(answer)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        envelope = self._envelope("chat.completion.chunk")

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
            "chain": self._stages(finished.chain),
            "ttft_s": round(finished.ttft_s, 4),
            "tokens_per_s": round(finished.tokens_per_s, 2),
        }


def _usage(finished: Finished) -> Json:
    completion = len(finished.token_ids)
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": finished.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
    }
