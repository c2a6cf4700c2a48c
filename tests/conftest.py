"""What all tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.reference import Reference


@pytest.fixture(scope="session")
def reference() -> Reference:
    """The embedded model, whole, run by transformers itself. Loading takes it a quarter of a minute."""
    import torch
    from support.reference import Reference

    torch.set_num_threads(1)
    return Reference()
