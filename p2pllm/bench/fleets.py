"""Random fleets of GPUs that Qwen3-32B is placed on: 64 layers of 0.975 GB, 65 % of memory for weights."""

from __future__ import annotations

import random
from collections.abc import Sequence

from p2pllm.scheduling import Budget, Capacity, ModelSize, Network, Offer, Request, Roofline

__all__ = ["DIFFERENT", "LAYERS", "TYPES", "Fleet", "measured", "random_fleet", "regional"]

LAYERS = 64
MODEL = ModelSize(LAYERS, 975_200_000, 1_560_000_000, 1_560_000_000, kv_bytes_per_token_layer=4096)
LAYER_PARAMETERS = 487_600_000
HEAD_PARAMETERS = 778_000_000
BUDGET = Budget(weights_ratio=0.65)

GPUS = {
    57: Roofline(3.1e14, 2.04e12),  # 80 GiB
    34: Roofline(1.8e14, 0.86e12),  # 48 GiB
    28: Roofline(3.1e14, 1.56e12),  # 40 GiB
    25: Roofline(0.3e14, 0.40e12),  # 36 GiB of unified memory
    22: Roofline(2.1e14, 1.79e12),  # 32 GiB
    20: Roofline(1.2e14, 0.90e12),  # 28 GiB
    17: Roofline(1.6e14, 1.01e12),  # 24 GiB
    14: Roofline(0.8e14, 0.36e12),  # 20 GiB
}
"""GPU types by how many layers fit on one, at whatever place in a pipeline."""

DIFFERENT = 0
"""Stands for a fleet without two peers alike."""

TYPES = {
    1: (22,),
    2: (22,) * 5 + (17,) * 2,
    4: (57, 28, 22, 17),
    8: tuple(GPUS),
}
"""Decks that typed fleets are dealt from, by number of types."""

SAME_REGION_S, CROSS_REGION_S = 0.001, 0.05
MEASURED_PEERS = 16
"""Peers that each one has measured its way to."""

Fleet = Sequence[Offer]


def random_fleet(peers: int, types: int, regions: int, rng: random.Random) -> Fleet:
    """Peers in random order, dealt evenly to the regions.

    A region need not hold a replica, and if none does, the pipeline crosses regions.
    """
    if types == DIFFERENT:
        hardware = [_unlike(rng) for _ in range(peers)]
    else:
        deck = TYPES[types]
        cards = list(deck) * (-(-peers // len(deck)))
        rng.shuffle(cards)
        hardware = [(Capacity.same(layers), GPUS[layers]) for layers in cards[:peers]]
    return [
        _offer(f"peer{number}", f"region{number % regions}", capacity, roofline)
        for number, (capacity, roofline) in enumerate(hardware)
    ]


def _unlike(rng: random.Random) -> tuple[Capacity, Roofline]:
    """Any memory from 8 to 96 GB, whose ends hold less than its middle."""
    memory = rng.uniform(8e9, 96e9)
    return BUDGET.capacity(MODEL, int(memory)), Roofline(rng.uniform(0.3e14, 4e14), rng.uniform(3e11, 2e12))


def _offer(peer: str, region: str, capacity: Capacity, roofline: Roofline) -> Offer:
    return Offer(
        peer,
        region,
        capacity,
        layer_s=roofline.layer_s(MODEL.layer_bytes, LAYER_PARAMETERS, Request(), "mix"),
        head_s=roofline.head_s(MODEL.head_bytes, HEAD_PARAMETERS, Request(), "mix"),
        kv_bytes=10 * 2**30,
        flops=roofline.flops,
    )


def regional(fleet: Fleet) -> Network:
    """ρ by regions alone: 1 ms inside, 50 ms across."""
    region_of = {offer.peer: offer.region for offer in fleet}
    return Network(region_of=region_of, same_region_s=SAME_REGION_S, cross_region_s=CROSS_REGION_S)


def measured(fleet: Fleet, rng: random.Random) -> Network:
    """The same where nothing is known better, but every peer has measured its way to 16 others."""
    known = {}
    for offer in fleet:
        for other in rng.sample(fleet, min(len(fleet), MEASURED_PEERS + 1)):
            typical = SAME_REGION_S if offer.region == other.region else CROSS_REGION_S
            if offer is not other:
                known[offer.peer, other.peer] = typical * rng.uniform(0.5, 2)
    return Network(
        region_of={offer.peer: offer.region for offer in fleet},
        measured=known,
        same_region_s=SAME_REGION_S,
        cross_region_s=CROSS_REGION_S,
    )
