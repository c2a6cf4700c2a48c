"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import structlog

if TYPE_CHECKING:
    from support.reference import Reference


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Commands that were run in this process have logs go elsewhere, or nowhere."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def reference() -> Reference:
    """The embedded model, whole, run by transformers itself. Loading takes it a quarter of a minute."""
    import torch
    from support.reference import Reference

    torch.set_num_threads(1)
    return Reference()


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny model that is not the embedded one."""
    from support.models import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny-other")
