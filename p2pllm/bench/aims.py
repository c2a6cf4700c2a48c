"""What figures are aimed at, and whether they are met."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from rich.console import Console

__all__ = ["Aim", "print_findings", "quiet"]


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


def print_findings(
    console: Console, found: dict[str, Any], aims: Sequence[tuple[Aim, float]], *, as_json: bool
) -> None:
    """Print what a bench ends with: one object with all that was ``found`` and the aims, or these alone."""
    if as_json:
        whole = found | {"aims": [aim.as_object(measured) for aim, measured in aims]}
        console.out(json.dumps(whole), highlight=False)
    else:
        console.out("\n".join(aim.says(measured) for aim, measured in aims), highlight=False)


def quiet() -> None:
    """Keep what the parts under measurement say out of what a bench prints."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    logging.disable(logging.ERROR)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
