"""How long both phases take, how good their plans are, and what memory they need, by size of the swarm.

Each cell of the table (peers × types × regions) runs in a process of its own, so that its peak of memory is
its own too. Times are taken over several random fleets, on one core, with Python's garbage collector on as it
is in a live peer.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path

import psutil

from p2pllm.bench.fleets import DIFFERENT, LAYERS, TYPES, Fleet, measured, random_fleet, regional
from p2pllm.bench.spread import Spread
from p2pllm.errors import ModelError
from p2pllm.scheduling import Holder, Network, Plan, Routes, place

__all__ = ["Cell", "Row", "all_cells", "measure", "measure_all"]

PEERS = (4, 8, 16, 32, 64, 128, 256, 1024, 4096)
REGIONS = (1, 4, 16)

SMALL = 256
"""Swarms of up to so many peers are cheap to measure."""

MEASURED_UP_TO = 1024
"""Peers up to which Phase 2 is timed with measured ways too."""

WARM_UP_PEERS = 32

MAX_DRAWS = 1000
"""Fleets drawn at most; nearly every one holds the model."""

MS = 1e3
"""In a second."""

CELL_LIMIT_S = 6.0
"""No more fleets are begun after this."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of fleet; ``types`` 0 means that no two peers are alike."""

    n: int
    types: int
    regions: int


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured in a cell. k, stages and their lower bound are of the fleet with the widest gap."""

    n: int
    types: int
    regions: int
    phase1_ms: Spread
    phase2_ms: Spread
    """With ρ by regions; ``phase2_measured_ms`` where every peer has measured its way to 16 others."""
    phase2_measured_ms: Spread | None
    compile_ms: Spread
    update_ms: Spread
    """To take one peer's new record; ``compile_ms`` is to take a whole view and find a first chain."""
    k: int
    stages: int
    lower_bound: int
    fleets: int
    certified: int
    """Fleets whose plan is proven to be optimal in k and in stages."""
    peak_mb: float


def all_cells(max_peers: int, *, quick: bool) -> list[Cell]:
    """The table's cells, without those that have more regions than peers."""
    types = (8, DIFFERENT) if quick else (*TYPES, DIFFERENT)
    grid = itertools.product(PEERS, types, REGIONS)
    return [Cell(*cell) for cell in grid if cell[2] <= cell[0] <= max_peers]


def measure_all(cells: Sequence[Cell], seed: int, *, quick: bool) -> Iterator[Row]:
    """Yield the row of each cell in turn."""
    # A fresh process each, and never two at a time.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for cell in cells:
            yield pool.submit(measure, cell, seed, quick=quick).result()


def measure(cell: Cell, seed: int, *, quick: bool) -> Row:
    """Measure one cell in this process."""
    _warm_up(cell, seed)
    samples = _Samples(runs=2 if quick else 3, asks=10 if quick or cell.n > SMALL else 30)
    wanted = 2 if quick else 20 if cell.n <= SMALL else 5
    began = time.perf_counter()
    for number in range(MAX_DRAWS):
        rng = random.Random(f"{seed} {cell} {number}")
        fleet = random_fleet(cell.n, cell.types, cell.regions, rng)
        # Four small peers may not hold the model: draw others.
        with suppress(ModelError):
            samples.take(fleet, rng)
        late = time.perf_counter() - began > CELL_LIMIT_S
        if len(samples.plans) == wanted or (samples.plans and late):
            break
    widest = max(samples.plans, key=lambda plan: plan.stages - plan.stages_bound)
    return Row(
        n=cell.n,
        types=cell.types,
        regions=cell.regions,
        phase1_ms=Spread.of(samples.phase1, scale=MS),
        phase2_ms=Spread.of(samples.phase2, scale=MS),
        phase2_measured_ms=Spread.of(samples.phase2_measured, scale=MS) if samples.phase2_measured else None,
        compile_ms=Spread.of(samples.compile, scale=MS),
        update_ms=Spread.of(samples.update, scale=MS),
        k=widest.k,
        stages=widest.stages,
        lower_bound=widest.stages_bound,
        fleets=len(samples.plans),
        certified=sum(_is_certified(plan) for plan in samples.plans),
        peak_mb=round(_peak_bytes() / 1e6, 1),
    )


def _warm_up(cell: Cell, seed: int) -> None:
    """Run everything once on a few peers: the first calls of a process are slow."""
    fleet = random_fleet(WARM_UP_PEERS, cell.types, 1, random.Random(seed))
    _Samples(runs=2, asks=2).take(fleet, random.Random(seed))


@dataclass(slots=True)
class _Samples:
    """Seconds, and plans."""

    runs: int
    asks: int
    phase1: list[float] = field(default_factory=list)
    phase2: list[float] = field(default_factory=list)
    phase2_measured: list[float] = field(default_factory=list)
    compile: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)

    def take(self, fleet: Fleet, rng: random.Random) -> None:
        """Place a fleet and route over its plan, several times."""
        network = regional(fleet)
        gc.collect()
        for _ in range(self.runs):
            with _timed(self.phase1):
                plan = place(LAYERS, fleet, network)
        self.plans.append(plan)
        self._route(fleet, plan, network, rng, self.phase2)
        if len(fleet) <= MEASURED_UP_TO:
            self._route(fleet, plan, measured(fleet, rng), rng, self.phase2_measured)

    def _route(
        self, fleet: Fleet, plan: Plan, network: Network, rng: random.Random, asked: list[float]
    ) -> None:
        """Ask for many chains, each for another entry and after another peer's record changed."""
        offers = {offer.peer: offer for offer in fleet}
        holders = [
            Holder(part.peer, part.start, part.end, offers[part.peer].layer_s, offers[part.peer].head_s)
            for part in plan.assignment.slices
        ]
        gc.collect()
        with _timed(self.compile):
            routes = Routes(LAYERS, network)
            for holder in holders:
                routes.put(holder.peer, [holder])
            routes.find()
        for _ in range(self.asks):
            holder = replace(rng.choice(holders), wait_s=rng.uniform(0, 1e-3))
            with _timed(self.update):
                routes.put(holder.peer, [holder])
            entry = rng.choice(fleet).peer
            with _timed(asked):
                routes.find(entry=entry)


@contextmanager
def _timed(seconds: list[float]) -> Iterator[None]:
    """Append how long something takes."""
    began = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - began)


def _is_certified(plan: Plan) -> bool:
    """Whether no other k could be better, and no placement with as many replicas takes fewer stages."""
    return plan.stages == plan.stages_bound and math.isclose(plan.z, plan.z_bound)


def _peak_bytes() -> int:
    """The most memory that this process ever had resident, interpreter and numpy included."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    if sys.platform == "linux":
        # Not from getrusage, where a process begins with what its parent had.
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        peak = next(line for line in lines if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024
    import resource

    peak_size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak_size if sys.platform == "darwin" else peak_size * 1024
