"""The kinds of records, and limits that several of them share."""

from __future__ import annotations

from typing import Final, Literal

__all__ = ["MAX_EPOCH", "MAX_GENERATION", "MAX_LAYERS", "Kind"]

Kind = Literal["peer", "metrics", "claim", "plan", "swarm"]

MAX_EPOCH: Final = 2**53
"""Leaders count up from the highest epoch seen, one at a time."""

MAX_GENERATION: Final = 2**32 - 1
"""A plan repeats what its peers say, and must still fit a record."""

MAX_LAYERS: Final = 4096
