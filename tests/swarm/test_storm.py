"""All peers of a swarm are gone at the same moment, and come back elsewhere."""

from __future__ import annotations

import time

import pytest

from p2pllm.bench.colony import Colony
from p2pllm.bench.samples import Setting

WITHIN_S = 2.0
RESTORED_S = 60.0
"""Five times what it takes 64 peers on two cores."""


@pytest.mark.parametrize(("count", "gently_s"), [(12, 1.0), pytest.param(64, 13.0, marks=pytest.mark.slow)])
def test_all_restart_within_two_seconds(count: int, gently_s: float) -> None:
    """Under the same identities on other ports; one bootstrap node stays, and knows where they were."""
    with Colony(Setting(encrypted=False, seed=0)) as colony:
        haven, *homes = (colony.settle() for _ in range(3))
        (boot,) = Colony.ask([haven], "start", [0], [], 0.0)
        (address,) = boot.values()
        lots = [range(1 + place, count + 1, 2) for place in range(2)]

        def start(within_s: float) -> dict[str, tuple[str, int]]:
            for home, lot in zip(homes, lots, strict=True):
                home.tell("start", lot, [address], within_s / len(lot))
            started = [home.answer(within_s) for home in homes]
            return {peer: address for members in (boot, *started) for peer, address in members.items()}

        def until_all_see(everybody: dict[str, tuple[str, int]], limit: float) -> None:
            ends = time.monotonic() + limit
            while missing := sum(Colony.ask([haven, *homes], "missing", everybody)):
                assert time.monotonic() < ends, f"{missing} are missing from views"
                time.sleep(0.05)

        before = start(gently_s)
        until_all_see(before, 60)
        Colony.ask(homes, "stop")
        began = time.monotonic()
        after = start(WITHIN_S)
        assert after.keys() == before.keys()
        assert not set(after.values()) & set(before.values()) - {address}
        until_all_see(after, RESTORED_S)
        print(f"{count} peers restarted, and all seen again after {time.monotonic() - began:.1f} s")
