"""How many rows of prompts go into a step."""

from __future__ import annotations

import pytest

from p2pllm.execution.pace import Pace


def test_all_while_nobody_decodes_and_little_while_somebody_does() -> None:
    pace = Pace()
    assert pace.rows(0.0, is_decoding=False) == 512
    assert pace.rows(0.0, is_decoding=True) == 64
    pace.note(1, 0, 0.05, 10.0)
    assert pace.rows(10.5, is_decoding=False) == 64, "its token will be back soon"
    assert pace.rows(12.0, is_decoding=False) == 512


@pytest.mark.parametrize(("row_s", "rows"), [(0.001, 60), (0.0001, 512), (0.1, 32)])
def test_steps_stay_near_twice_as_long(row_s: float, rows: int) -> None:
    """0.05 s of decoding, stretched to 2.2 times as long: 0.06 s are for prompts."""
    pace = Pace()
    for _ in range(5):
        pace.note(3, 0, 0.05, 10.0)
        pace.note(3, 40, 0.05 + 40 * row_s, 10.0)
        pace.note(3, 4, 9.0, 10.0)  # too few rows to tell
    assert pace.rows(10.0, is_decoding=True) == pytest.approx(rows, abs=1)
