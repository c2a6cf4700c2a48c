"""What people see is text, whatever strangers call themselves."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from support.bodies import metrics_body, peer_body

from p2pllm.errors import NoRouteError
from p2pllm.records import Span
from p2pllm.scheduling import Chain, ModelSize
from p2pllm.serving import Status, print_swarm
from p2pllm.swarm import PeerState

NAME = "[/x] [bold red]eu[/] [link=http://x]"

SIZE = ModelSize(layers=9, layer_bytes=1, embed_bytes=1, head_bytes=1, kv_bytes_per_token_layer=1)


class NoRoute:
    """A router that finds no chain."""

    def chain(self, **_: Any) -> Chain:
        raise NoRouteError(())


def test_names_are_not_markup() -> None:
    states = [
        PeerState(
            "a" * 40, peer_body(region=NAME, hardware=NAME), metrics_body(spans=(Span(0, 3, "loading"),)), 0.0
        ),
        PeerState(
            "b" * 40,
            peer_body(),
            metrics_body(spans=(Span(4, 6, "ready"),), free_kv_blocks=735, cached_kv_blocks=77),
            0.0,
        ),
        PeerState("c" * 40, peer_body(paused=True), None, 0.0),
    ]
    leadership = SimpleNamespace(leader=None, epoch=0, led_epoch=0, plan=None)
    view = SimpleNamespace(peers=lambda _: states)
    status = Status(
        model=NAME,
        size=SIZE,
        parameters=1,
        swarm=SimpleNamespace(id=bytes(20), own="a" * 40, view=view, leadership=leadership, contacts=0),  # type: ignore[arg-type]
        router=NoRoute(),  # type: ignore[arg-type]
        bootstrap="",
        loading=lambda: 0.25,
    )
    swarm = status.swarm()
    assert swarm["loading"] == 0.25
    console = Console(file=io.StringIO(), width=200)
    print_swarm(console, swarm)
    shown = console.file.getvalue()
    assert shown.count(NAME) == 3
    for words in (
        "aaaaaaaa (this one)",
        "0:3 loading",
        "paused",
        "4:6",
        "no peer serves layers 0:4, 6:9",
        "1.0 GiB",
        "735 free, 77 cached",
    ):
        assert words in shown
