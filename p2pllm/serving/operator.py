"""What the operator of a peer may tell it over its API, from the same machine only."""

from __future__ import annotations

import ipaddress
from typing import Final, Protocol

from aiohttp import web

__all__ = ["OPERATOR_COMMANDS", "OPERATOR_HEADER", "Operator", "is_local", "operator_routes"]

OPERATOR_HEADER: Final = "X-P2PLLM-Operator"
"""Must be there: a web page that somebody has open on this machine cannot send it unasked."""

OPERATOR_COMMANDS: Final = ("replan", "leave", "pause", "resume")


class Operator(Protocol):
    """A peer as its operator commands it. Nothing here waits until it is done."""

    def replan(self, *, force: bool) -> None:
        """Ask the leader to place everybody anew; ``force`` may interrupt the service."""

    def leave(self) -> None:
        """Hand over, finish, and end."""

    def pause(self) -> None:
        """Hand over and stay, without layers."""

    def resume(self) -> None:
        """Take layers again."""


def operator_routes(operator: Operator) -> list[web.RouteDef]:
    """``POST /api/<command>`` for each of OPERATOR_COMMANDS; ``?force=1`` with replan."""

    async def handle(request: web.Request) -> web.Response:
        _check_local(request)
        command = request.path.rpartition("/")[2]
        if command == "replan":
            operator.replan(force=request.query.get("force") == "1")
        else:
            getattr(operator, command)()
        return web.json_response({"command": command, "accepted": True})

    return [web.post(f"/api/{command}", handle) for command in OPERATOR_COMMANDS]


def is_local(request: web.Request) -> bool:
    """Whether a request comes from the peer's own machine."""
    try:
        return ipaddress.ip_address(request.remote or "").is_loopback
    except ValueError:
        return False


def _check_local(request: web.Request) -> None:
    if not is_local(request) or OPERATOR_HEADER not in request.headers:
        raise web.HTTPForbidden(text="operator commands are taken only from the machine of the peer itself")
