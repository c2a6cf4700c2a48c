"""What may stand in a cluster file.

    {"model": {"name", "layers", "hidden", "layer_bytes", "embed_bytes", "head_bytes",
               "kv_bytes_per_token_layer", "layer_params", "tied"},
     "peers": [{"id", "region", "memory_bytes", "flops", "bandwidth", "capacity", "tau_s"}, …],
     "network": {"same_region_s", "cross_region_s", "pairs": [[from, to, seconds], …]},
     "options": {"weights_ratio" or "kv_reserve_tokens", "objective", "alpha", "r_rtt_s", "t_comp_s",
                 "phase", "entry", "expected_tokens", "expected_prompt"},
     "today": {"pipelines", "spares"}}

A peer holds as many layers as its ``capacity`` says, else what fits into ``memory_bytes``; it is as fast as
``tau_s`` says, else as the roofline of ``flops`` and ``bandwidth``. ``today`` is the output of an earlier
plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from p2pllm.scheduling import Phase, Request, Roofline

__all__ = ["ClusterFile", "Model", "Peer", "Piece", "explain"]

MAX_LAYERS = 1024
TYPICAL = Request()


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be printable text")
    return text


def _whole(value: Any) -> Any:
    """Take 34e9 for an integer: so people write bytes."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_printable)]
Count = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=2**53)]
Positive = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=2**53)]
Seconds = Annotated[float, Field(ge=0, le=86400)]
PerSecond = Annotated[float, Field(ge=1, le=1e24)]


class _Part(BaseModel):
    """Part of the file: no unknown keys, no NaN, no number in quotes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Model(_Part):
    """Bytes of one layer, of the embedding, and of norm and LM head, in the dtype that peers hold.

    ``hidden`` says how much goes over a hop, which matters to simulations only.
    """

    name: Name = "model"
    layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    hidden: Positive | None = None
    layer_bytes: Positive | None = None
    embed_bytes: Count | None = None
    head_bytes: Count | None = None
    kv_bytes_per_token_layer: Count | None = None
    layer_params: Positive | None = None
    tied: bool = False


class Peer(_Part):
    """``capacity`` (layers, at any place in a pipeline) and ``tau_s`` (s, for the peer's whole slice) come
    before what memory (bytes), FLOP/s and bandwidth (bytes/s) would give.
    """

    id: Name
    region: Name | None = None
    memory_bytes: Count | None = None
    flops: PerSecond | None = None
    bandwidth: PerSecond | None = None
    capacity: Count | None = None
    tau_s: Seconds | None = None

    @property
    def roofline(self) -> Roofline | None:
        """What its hardware can do, if the file says."""
        if self.flops is None or self.bandwidth is None:
            return None
        return Roofline(self.flops, self.bandwidth)

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.memory_bytes is None and self.capacity is None:
            raise ValueError("memory_bytes or capacity missing")
        if (self.flops is None) != (self.bandwidth is None):
            raise ValueError("flops and bandwidth come together")
        return self


class Links(_Part):
    """One-way seconds; a pair counts for both directions unless both are given."""

    same_region_s: Seconds | None = None
    cross_region_s: Seconds | None = None
    pairs: tuple[tuple[Name, Name, Seconds], ...] = ()

    @model_validator(mode="after")
    def _are_pairs(self) -> Self:
        directed = Counter((source, target) for source, target, _ in self.pairs)
        for (source, target), count in directed.items():
            if source == target:
                raise ValueError(f"pairs has {source!r} with itself")
            if count > 1:
                raise ValueError(f"pairs has {source!r} to {target!r} {count} times")
        return self


class Options(_Part):
    """How to plan, and what requests are expected."""

    weights_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    kv_reserve_tokens: Count | None = None
    objective: Literal["linear", "ratio", "throughput"] = "linear"
    alpha: Annotated[float, Field(ge=0, le=10)] = 1.0
    r_rtt_s: Seconds | None = None
    t_comp_s: Annotated[float, Field(ge=1e-9, le=86400)] | None = None
    phase: Phase = "mix"
    entry: Name | None = None
    expected_tokens: Positive = TYPICAL.tokens
    expected_prompt: Positive = TYPICAL.prompt

    @model_validator(mode="after")
    def _is_one_budget(self) -> Self:
        if self.weights_ratio is not None and self.kv_reserve_tokens is not None:
            raise ValueError("weights_ratio and kv_reserve_tokens exclude each other")
        return self


class _Printed(_Part):
    """Part of the output of an earlier plan, which says more than is read here."""

    model_config = ConfigDict(extra="ignore")


class Piece(_Printed):
    """A slice of today."""

    peer: Name
    start: Annotated[int, Field(ge=0)]
    end: int


class Line(_Printed):
    """A pipeline of today."""

    stages: tuple[Piece, ...]


class Today(_Printed):
    """Who holds what today."""

    pipelines: tuple[Line, ...]
    spares: tuple[Piece, ...] = ()

    def pieces(self) -> tuple[Piece, ...]:
        """Return what everyone holds."""
        return (*(piece for line in self.pipelines for piece in line.stages), *self.spares)

    @model_validator(mode="after")
    def _peers_have_one_slice(self) -> Self:
        for name, count in Counter(piece.peer for piece in self.pieces()).items():
            if count > 1:
                raise ValueError(f"{name!r} has {count} slices")
        return self


class ClusterFile(_Part):
    """The whole file."""

    model: Model
    peers: Annotated[tuple[Peer, ...], Field(min_length=1)]
    network: Links = Links()
    options: Options = Options()
    today: Today | None = None

    @model_validator(mode="after")
    def _names_are_of_peers(self) -> Self:
        known = Counter(peer.id for peer in self.peers)
        for name, count in known.items():
            if count > 1:
                raise ValueError(f"peers: {count} of them have the id {name!r}")
        named = {"network.pairs": {name for pair in self.network.pairs for name in pair[:2]}}
        if self.options.entry is not None:
            named["options.entry"] = {self.options.entry}
        for place, names in named.items():
            if strangers := sorted(names - known.keys()):
                raise ValueError(f"{place}: no peer has the id {strangers[0]!r}")
        return self

    @model_validator(mode="after")
    def _speeds_are_known_of_all_or_none(self) -> Self:
        known = [peer.tau_s is not None or peer.roofline is not None for peer in self.peers]
        if any(known) and not all(known):
            place = f"peers[{known.index(False)}]"
            raise ValueError(f"{place}: tau_s, or flops and bandwidth, missing, which other peers have")
        return self

    @model_validator(mode="after")
    def _slices_of_today_are_of_the_model(self) -> Self:
        for piece in self.today.pieces() if self.today else ():
            if not piece.start < piece.end <= self.model.layers:
                where = f"{piece.start}:{piece.end} of {self.model.layers}"
                raise ValueError(f"today: {piece.peer!r} cannot have layers {where}")
        return self


def explain(error: ValidationError) -> str:
    """Return the first thing that is wrong, in one line, with its place in the file."""
    # A key that nobody knows is often the one that is missing, mistyped.
    first = min(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    said, path = first["msg"].removeprefix("Value error, ").replace("Input should", "must"), first["loc"]
    match first["type"]:
        case "json_invalid":
            return f"not JSON: {first['ctx']['error']}"
        case "extra_forbidden":
            said, path = f"unknown key {path[-1]!r}", path[:-1]
        case "missing":
            return f"{_place(path)} missing"
        case "too_short" | "string_too_short":
            return f"{_place(path)}: must not be empty"
        case _ if isinstance(first["input"], int | float):
            said += f", got {first['input']}"
    return f"{_place(path)}: {said}" if path else said


def _place(path: Sequence[str | int]) -> str:
    """Return where in the file, as ``peers[2].id``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")
