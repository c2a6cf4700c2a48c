"""From a cluster file to the values that scheduling takes."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from p2pllm.cluster.schema import ClusterFile, Model, Peer, Piece, explain
from p2pllm.errors import ClusterError
from p2pllm.scheduling import (
    Assignment,
    Budget,
    Capacity,
    Goal,
    Holder,
    ModelSize,
    Network,
    Offer,
    PeerId,
    Phase,
    Pipeline,
    Request,
    Roofline,
    Slice,
    derive_regions,
)

__all__ = ["Cluster", "parse_cluster", "read_cluster"]

MAX_FILE = 64 * 2**20

LONE_REGION = "default"
"""Where peers are when nothing in the file tells one place from another."""

EQUAL_LAYER_S = 1e-3
"""Of every peer when the file says nothing about anybody's speed."""

LEAST_LAYER_S = 1e-9
"""Phase 1 divides by seconds per layer, so there a ``tau_s`` of 0 comes to this."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster file as scheduling takes it.

    ``decode_s`` has what one token of an answer takes on each peer: (seconds per layer, seconds for the
    head), or where the file gives ``tau_s`` the seconds for the whole slice, however long. ``today`` holds
    pipelines and spares of an earlier plan. ``entry`` and ``expected_tokens`` are for the chain.
    """

    model: str
    layers: int
    offers: tuple[Offer, ...]
    network: Network
    goal: Goal
    decode_s: Mapping[PeerId, tuple[float, float] | float]
    today: Assignment | None
    entry: PeerId | None
    expected_tokens: int

    def holder(self, piece: Slice) -> Holder:
        """Return a planned slice as Phase 2 sees it once its peer is ready and idle."""
        cost = self.decode_s[piece.peer]
        layer_s, head_s = (cost / (piece.end - piece.start), 0.0) if isinstance(cost, float) else cost
        return Holder(piece.peer, piece.start, piece.end, layer_s, head_s)


def read_cluster(path: Path) -> Cluster:
    """Read a cluster file. Raises ClusterError, which names the file and the place in it."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE + 1)
        if len(text) > MAX_FILE:
            raise ClusterError(f"more than {MAX_FILE // 2**20} MiB")
        return parse_cluster(text.removeprefix(codecs.BOM_UTF8))
    except OSError as error:
        raise ClusterError(f"{path}: {error.strerror}") from error
    except ClusterError as error:
        raise ClusterError(f"{path}: {error}") from error


def parse_cluster(text: bytes | str) -> Cluster:
    """Check the text of a cluster file. Raises ClusterError with the place in it and what is wrong there."""
    try:
        file = ClusterFile.model_validate_json(text)
    except ValidationError as error:
        raise ClusterError(explain(error)) from error
    options = file.options
    network = _network(file)
    return Cluster(
        model=file.model.name,
        layers=file.model.layers,
        offers=tuple(_offer(peer, network.region_of[peer.id], file) for peer in file.peers),
        network=network,
        goal=Goal(options.objective, options.alpha, options.r_rtt_s, options.t_comp_s),
        decode_s={peer.id: _decode_s(peer, file) for peer in file.peers},
        today=_today(file, network),
        entry=options.entry,
        expected_tokens=options.expected_tokens,
    )


def _network(file: ClusterFile) -> Network:
    """Return ρ, with regions derived from the pairs where the file names none."""
    links = file.network
    peers = [peer.id for peer in file.peers]
    measured = {(source, target): seconds for source, target, seconds in links.pairs}
    given = {peer.id: peer.region for peer in file.peers if peer.region is not None}
    if given or measured:
        regions = derive_regions(peers, given, measured)
    else:
        regions = dict.fromkeys(peers, LONE_REGION)
    return Network(
        region_of=regions,
        measured=measured,
        same_region_s=links.same_region_s,
        cross_region_s=links.cross_region_s,
    )


def _offer(peer: Peer, region: str, file: ClusterFile) -> Offer:
    """Return what a peer brings to Phase 1, in the expected mix of prefill and decode."""
    options = file.options
    capacity, kv_bytes = Capacity.same(0), 0
    if peer.memory_bytes is not None:
        size, budget = _size(file.model), Budget(options.weights_ratio, options.kv_reserve_tokens)
        capacity = budget.capacity(size, peer.memory_bytes)
        kv_bytes = budget.kv_bytes(size, peer.memory_bytes)
    if peer.capacity is not None:
        capacity = Capacity.same(min(peer.capacity, file.model.layers))
    if peer.roofline is not None:
        layer_s, head_s = _roofline_s(peer.roofline, file, options.phase)
    elif peer.tau_s is not None:
        layer_s, head_s = max(LEAST_LAYER_S, peer.tau_s / max(1, capacity.middle)), 0.0
    else:
        layer_s, head_s = EQUAL_LAYER_S, 0.0
    return Offer(peer.id, region, capacity, layer_s, head_s, kv_bytes, peer.flops or 0.0)


def _decode_s(peer: Peer, file: ClusterFile) -> tuple[float, float] | float:
    """Return a peer's entry in ``Cluster.decode_s``."""
    if peer.tau_s is not None:
        return peer.tau_s
    return (EQUAL_LAYER_S, 0.0) if peer.roofline is None else _roofline_s(peer.roofline, file, "decode")


def _roofline_s(roofline: Roofline, file: ClusterFile, phase: Phase) -> tuple[float, float]:
    """Return seconds per token for one layer, and for the head."""
    size = _size(file.model)
    # Unless told otherwise, two bytes are a parameter.
    parameters = file.model.layer_params or size.layer_bytes / 2
    head_parameters = parameters * size.head_bytes / size.layer_bytes
    request = Request(file.options.expected_prompt, file.options.expected_tokens)
    return (
        roofline.layer_s(size.layer_bytes, parameters, request, phase),
        roofline.head_s(size.head_bytes, head_parameters, request, phase),
    )


def _today(file: ClusterFile, network: Network) -> Assignment | None:
    """Return what the file says that everyone holds today."""
    if file.today is None:
        return None
    pipelines = []
    for line in file.today.pipelines:
        slices = _slices(line.stages)
        regions = (network.region_of[part.peer] for part in slices if part.peer in network.region_of)
        pipelines.append(Pipeline(tuple(dict.fromkeys(regions)), slices))
    return Assignment(tuple(pipelines), _slices(file.today.spares))


def _slices(pieces: Iterable[Piece]) -> tuple[Slice, ...]:
    return tuple(Slice(piece.peer, piece.start, piece.end) for piece in pieces)


def _size(model: Model) -> ModelSize:
    """Return the model in bytes. Raises ClusterError when the file leaves something out."""
    sizes = {
        "layer_bytes": model.layer_bytes,
        "embed_bytes": model.embed_bytes,
        # A tied head is a copy of the embedding, whatever else the last stage holds.
        "head_bytes": max(model.embed_bytes or 0, model.head_bytes or 0) if model.tied else model.head_bytes,
        "kv_bytes_per_token_layer": model.kv_bytes_per_token_layer,
    }
    known = {name: size for name, size in sizes.items() if size is not None}
    if len(known) < len(sizes):
        lacking = ", ".join(name for name in sizes if name not in known)
        raise ClusterError(f"model: {lacking} missing, which memory_bytes and flops of peers call for")
    return ModelSize(layers=model.layers, tied=model.tied, **known)
