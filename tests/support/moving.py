"""Peers that do at once what they may do."""

from __future__ import annotations

from collections.abc import Iterable

from p2pllm.scheduling import Moves, Slice

__all__ = ["after", "single_layers"]


def single_layers(slices: Iterable[Slice]) -> list[Slice]:
    """The same holdings, one slice for each layer."""
    owned = {(piece.peer, layer) for piece in slices for layer in range(piece.start, piece.end)}
    return [Slice(peer, layer, layer + 1) for peer, layer in sorted(owned)]


def after(held: list[Slice], moves: Moves) -> list[Slice]:
    """What peers hold, layer by layer, when they have done all of ``moves``."""
    dropped = single_layers(moves.drop)
    return [piece for piece in single_layers([*held, *moves.load]) if piece not in dropped]
