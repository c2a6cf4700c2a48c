"""How many rows of prompts go into a step."""

from __future__ import annotations

import pytest

from p2pllm.execution.pace import Pace


def test_all_while_nobody_decodes_and_little_while_somebody_does() -> None:
    pace = Pace()
    assert pace.rows(0.0, decoding=0) == 512
    assert pace.rows(0.0, decoding=1) == 48
    pace.note(1, 0, 0.05, 10.0)
    assert pace.rows(10.5, decoding=0) == 48, "its token will be back soon"
    assert pace.rows(12.0, decoding=0) == 512


@pytest.mark.parametrize(
    ("row_s", "decoding", "rows"),
    [
        (0.001, 3, 80),
        (0.0001, 3, 512),
        (0.0021, 3, 38),
        (0.004, 3, 12),  # 20, and 15 in all take much less time
        (0.1, 3, 9),
        (0.1, 7, 8),
        (0.1, 8, 8),
        (0.1, 60, 8),
    ],
)
def test_steps_stay_near_two_and_a_half_times_as_long(row_s: float, decoding: int, rows: int) -> None:
    """0.05 s of decoding, stretched to 2.6 times as long, leave 0.08 s for prompts: with the decoding ones
    they make a step of a good size, and are at least 8.
    """
    pace = Pace()
    for _ in range(5):
        pace.note(3, 0, 0.05, 10.0)
        pace.note(3, 40, 0.05 + 40 * row_s, 10.0)
        pace.note(3, 4, 9.0, 10.0)  # too few rows to tell
    assert pace.rows(10.0, decoding=decoding) == rows
