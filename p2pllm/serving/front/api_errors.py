"""Errors as OpenAI's clients read them: the status, the body, and when to come again."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import structlog
from aiohttp import web
from pydantic import ValidationError

from p2pllm.errors import (
    BusyError,
    ContextLengthError,
    NoRouteError,
    P2PLLMError,
    RequestError,
    SessionError,
)

__all__ = ["error_body", "error_response", "errors_as_json"]

RETRY_AFTER_S = 1.0

_CODES = {401: "invalid_api_key", 404: "not_found"}

log = structlog.get_logger()

Json = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _status(error: Exception) -> tuple[int, str, str | None]:
    """(HTTP status, OpenAI error type, code) of an error."""
    match error:
        case ContextLengthError():
            return 400, "invalid_request_error", "context_length_exceeded"
        case RequestError() | ValidationError():
            return 400, "invalid_request_error", None
        case web.HTTPException(status=status):
            kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
            return status, kind, _CODES.get(status)
        case BusyError():
            return 429, "rate_limit_error", "overloaded"
        case NoRouteError() | SessionError():
            return 503, "server_error", "no_route" if isinstance(error, NoRouteError) else "broke_off"
        case _:
            return 500, "server_error", None


def _message(error: Exception) -> str:
    match error:
        case ValidationError():
            first = error.errors()[0]
            return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        case web.HTTPException():
            return error.text or error.reason
        case P2PLLMError():
            return str(error)
        case _:
            return "internal error, see the log of this peer"


def error_body(error: Exception) -> Json:
    """The body of an answer, or the last event of one that broke off, that tells of an error."""
    _, kind, code = _status(error)
    return {"error": {"message": _message(error), "type": kind, "param": None, "code": code}}


def error_response(error: Exception, *, partial: str = "") -> web.Response:
    """The whole answer that tells of an error: 503 if something was said before it, with that in it."""
    status, body = _status(error)[0], error_body(error)
    if partial:
        status, body["error"]["partial"] = 503, partial
    return web.json_response(body, status=status, headers=_headers(error, status))


def _headers(error: Exception, status: int) -> dict[str, str]:
    if isinstance(error, web.HTTPUnauthorized):
        return {"WWW-Authenticate": "Bearer"}
    if status not in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        return {}
    seconds = error.retry_after_s if isinstance(error, BusyError) else RETRY_AFTER_S
    return {"Retry-After": str(math.ceil(seconds))}


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors in the shape that OpenAI's clients parse."""
    try:
        return await handler(request)
    except (P2PLLMError, ValidationError, web.HTTPException) as error:
        return error_response(error)
    except ConnectionResetError:
        raise  # nobody is there to tell
    except Exception as error:
        log.exception("request_crashed", path=request.path)
        return error_response(error)
