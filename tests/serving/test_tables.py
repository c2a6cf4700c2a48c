"""What people see is text, whatever strangers call themselves."""

from __future__ import annotations

import io

from rich.console import Console
from support.bodies import metrics_body, peer_body

from p2pllm.records import Span
from p2pllm.serving import print_swarm, swarm_json
from p2pllm.swarm import PeerState

NAME = "[/x] [bold red]eu[/] [link=http://x]"


def test_names_are_not_markup() -> None:
    states = [
        PeerState(
            "a" * 40, peer_body(region=NAME, hardware=NAME), metrics_body(spans=(Span(0, 3, "loading"),)), 0.0
        ),
        PeerState("b" * 40, peer_body(), None, 0.0),
    ]
    swarm = swarm_json(
        swarm=bytes(20),
        model=NAME,
        layers=9,
        own="a" * 40,
        peers=states,
        route=None,
        bootstrap="",
        contacts=0,
        missing=((0, 3), (7, 9)),
    )
    console = Console(file=io.StringIO(), width=200)
    print_swarm(console, swarm)
    shown = console.file.getvalue()
    assert shown.count(NAME) == 3
    for words in (
        "aaaaaaaa (this one)",
        "0:3 loading",
        "starting",
        "no peer serves layers 0:3, 7:9",
        "1.0 GiB",
    ):
        assert words in shown
