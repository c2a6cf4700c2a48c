"""What figures are aimed at, and whether they are met."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import structlog

__all__ = ["Aim", "quiet"]


@dataclass(frozen=True, slots=True)
class Aim:
    """A limit on one figure: the least it should be, or with ``at_most`` the most."""

    name: str
    limit: float
    at_most: bool = False

    def says(self, measured: float) -> str:
        """One line for people."""
        missed = measured > self.limit if self.at_most else measured < self.limit
        bound = "at most" if self.at_most else "at least"
        return f"{self.name}: {measured:.3g}, aim {bound} {self.limit:g}{': missed' if missed else ''}"

    def as_object(self, measured: float) -> dict[str, Any]:
        """What ``--json`` prints of it."""
        return {"name": self.name, "limit": self.limit, "at_most": self.at_most, "measured": measured}


def quiet() -> None:
    """Keep what the parts under measurement say out of what a bench prints."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    logging.disable(logging.ERROR)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
