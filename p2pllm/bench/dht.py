"""How fast a swarm hears of what happens in it, and what that costs, when all is well and when it is not.

Many members in a few processes, each with a DHT node and encrypted links of its own on loopback. They differ
from peers only in that they hold no model. Ages and delays across processes are right because all of them
read the same clocks, those of one machine.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from p2pllm.bench.colony import Colony, Dwelling
from p2pllm.bench.samples import Samples, Setting
from p2pllm.bench.spread import Spread
from p2pllm.config import Address
from p2pllm.errors import P2PLLMError, UsageError
from p2pllm.identity import PeerId

__all__ = ["SCENARIOS", "Row", "Scenario", "delays", "measure_all"]

EVENT_SHARE: Final = 0.02
"""While the swarm serves, so many of its peers open or close a chain in a second, and one at least."""

SPACING_S: Final = 0.4
"""Between the starts of two members of a process: they share a core, and starting is the most work."""

WARM_UP_S: Final = 12.0
"""From when all see all until something happens to them, or is measured."""

TOGETHER_S: Final = 60.0
POLL_S: Final = 0.1
JOINS: Final = 3
KILO: Final = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What happens to a swarm: it serves or is idle, shares of its peers are killed at once as by kill -9, or
    were hostile nodes from the start, and datagrams get lost.
    """

    serving: bool = True
    killed: float = 0.0
    loss: float = 0.0
    hostile: float = 0.0


SCENARIOS: Final = {
    "healthy": Scenario(),
    "idle": Scenario(serving=False),
    "killed25": Scenario(killed=0.25),
    "loss1": Scenario(loss=0.01),
    "loss5": Scenario(loss=0.05),
    "hostile10": Scenario(hostile=0.1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was measured in one scenario, of the honest peers that lived to the end of it.

    ``age_s`` is how long ago the newest record of each was signed that each other has, ``event_s`` the
    time from an opened or closed chain until each other knows it (None where nobody serves), ``publish_ms``
    that of a record to its replicas. ``join_s`` is the median time from the start of a new peer until it
    sees all others, ``start_s`` the time from the first peer's until all see all, ``gone_s`` that from the
    death of peers until nobody sees any of them; None if that did not come to be.

    Rates are per peer: kB (1000 bytes) it received, and sent, as datagrams and over links;
    ``link_kb_per_s`` is the part of those received that came over links, without what encryption and TCP
    add. ``cpu_percent`` is of one core, and contains the bench itself. Of ``looked_records`` that should
    have been in a view when somebody looked, ``missing_records`` were not.
    """

    peers: int
    scenario: str
    age_s: Spread
    event_s: Spread | None
    publish_ms: Spread
    join_s: float | None
    start_s: float | None
    gone_s: float | None
    kb_per_s: float
    kb_sent_per_s: float
    link_kb_per_s: float
    datagrams_per_s: float
    cpu_percent: float
    missing_records: int
    looked_records: int


def measure_all(
    names: Sequence[str], peers: int, seconds: float, processes: int, setting: Setting
) -> Iterator[Row]:
    """Yield the row of each scenario in turn.

    Raises UsageError for a swarm in which there is nothing to measure, P2PLLMError if a process is lost, or
    all peers are alone.
    """
    if peers < 2 * processes or peers < 4:
        raise UsageError(f"--peers {peers} is too few: 4 at least, and 2 for each of the --processes")
    for name in names:
        with Colony(setting) as colony:
            yield _Run(colony, name, peers, seconds, processes).row()


class _Run:
    """One scenario."""

    def __init__(self, colony: Colony, name: str, peers: int, seconds: float, processes: int) -> None:
        self._colony = colony
        self._name = name
        self._peers = peers
        self._seconds = seconds
        self._scenario = scenario = SCENARIOS[name]
        self._hostile = _share(peers, scenario.hostile)
        self._doomed = _share(peers, scenario.killed)
        self._dwellings = [colony.settle() for _ in range(processes)]
        self._bootstrap: Address = "", 0

    def row(self) -> Row:
        """Go through it."""
        doomed = [self._colony.settle()] if self._doomed else []
        began = time.monotonic()
        live, dead = self._start(doomed)
        is_whole = self._come_together([*self._dwellings, *doomed], live | dead)
        start_s = round(time.monotonic() - began, 2) if is_whole else None
        Colony.ask(self._dwellings, "lose", self._scenario.loss)
        self._measure([*self._dwellings, *doomed], live | dead, (), WARM_UP_S)
        for dwelling in doomed:
            dwelling.kill()
        samples = self._measure(self._dwellings, live, list(dead), self._seconds)
        return self._summed(samples, start_s, self._join_s(live))

    def _start(self, doomed: Sequence[Dwelling]) -> tuple[dict[PeerId, Address], dict[PeerId, Address]]:
        """Start everybody; return who is to live and who is to die, and where they are."""
        honest = range(self._peers - self._hostile)
        first, *others = honest[: len(honest) - self._doomed]
        live: dict[PeerId, Address]
        (live,) = Colony.ask(self._dwellings[:1], "start", [first], [], 0.0)
        (self._bootstrap,) = live.values()
        if self._hostile:
            numbers = range(len(honest), self._peers)
            Colony.ask([self._colony.settle()], "harm", numbers, self._bootstrap)
        count = len(self._dwellings)
        lots = [others[place::count] for place in range(count)] + [honest[len(others) + 1 :]]
        everywhere = [*self._dwellings, *doomed]
        for dwelling, lot in zip(everywhere, lots, strict=False):
            dwelling.tell("start", lot, [self._bootstrap], SPACING_S)
        started = [dwelling.answer(self._peers * SPACING_S) for dwelling in everywhere]
        for members in started[:count]:
            live.update(members)
        return live, started[count] if doomed else {}

    def _come_together(self, dwellings: Sequence[Dwelling], everybody: Mapping[PeerId, Address]) -> bool:
        """Wait until everybody sees everybody; False if that takes too long."""
        end = time.monotonic() + TOGETHER_S
        while sum(Colony.ask(dwellings, "missing", everybody)):
            if time.monotonic() > end:
                return False
            time.sleep(POLL_S)
        return True

    def _measure(
        self,
        dwellings: Sequence[Dwelling],
        live: Mapping[PeerId, Address],
        dead: Collection[PeerId],
        seconds: float,
    ) -> list[Samples]:
        events_per_s = (
            max(1.0, EVENT_SHARE * self._peers) / len(dwellings) if self._scenario.serving else None
        )
        found: list[Samples] = Colony.ask(
            dwellings, "measure", live, dead, seconds, events_per_s, takes_s=seconds
        )
        return found

    def _join_s(self, live: Mapping[PeerId, Address]) -> float | None:
        """The median of a few joins, one after the other."""
        took: list[float] = []
        for number in range(self._peers, self._peers + JOINS):
            (seconds,) = Colony.ask(self._dwellings[-1:], "join", number, self._bootstrap, live)
            if seconds is None:
                return None
            took.append(seconds)
        return round(median(took), 3)

    def _summed(self, parts: Sequence[Samples], start_s: float | None, join_s: float | None) -> Row:
        peer_seconds = sum(part.members * part.seconds for part in parts)
        gone = [part.gone_s for part in parts]

        def rate(*counters: str) -> float:
            total: int = sum(getattr(part.traffic, counter) for part in parts for counter in counters)
            return total / peer_seconds

        ages = [age for part in parts for age in part.ages]
        if not ages:
            raise P2PLLMError(
                f"no peer of {self._peers} saw any other: this machine is too busy, try fewer --peers"
            )
        late = delays(parts)
        return Row(
            peers=self._peers,
            scenario=self._name,
            age_s=Spread.of(ages),
            event_s=Spread.of(late) if late else None,
            publish_ms=Spread.of([put for part in parts for put in part.puts], scale=KILO),
            join_s=join_s,
            start_s=start_s,
            gone_s=round(max(filter(None, gone), default=0.0), 2)
            if self._doomed and None not in gone
            else None,
            kb_per_s=round(rate("datagram_bytes_in", "link_bytes_in") / KILO, 2),
            kb_sent_per_s=round(rate("datagram_bytes_out", "link_bytes_out") / KILO, 2),
            link_kb_per_s=round(rate("link_bytes_in") / KILO, 2),
            datagrams_per_s=round(rate("datagrams_in"), 1),
            cpu_percent=round(100 * sum(part.cpu_s for part in parts) / peer_seconds, 2),
            missing_records=sum(part.missing for part in parts),
            looked_records=sum(part.looked for part in parts),
        )


def _share(peers: int, share: float) -> int:
    return max(1, round(share * peers)) if share else 0


def delays(parts: Sequence[Samples]) -> list[float]:
    """Seconds from each event until each other member had seen it, or one after it of the same member.

    What was not seen before the end counts as if it had been seen then.
    """
    ended = max(part.ended for part in parts)
    events = [event for part in parts for event in part.events]
    found: list[float] = []
    for part in parts:
        for viewer, sightings in part.sightings.items():
            seen: dict[PeerId, tuple[list[int], list[float]]] = {}
            for peer, number, when in sightings:
                numbers, times = seen.setdefault(peer, ([], []))
                numbers.append(number)
                times.append(when)
            for peer, number, when in events:
                if peer != viewer:
                    numbers, times = seen.get(peer, ([], []))
                    place = bisect_left(numbers, number)
                    found.append((times[place] if place < len(times) else ended) - when)
    return found
