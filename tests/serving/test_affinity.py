"""What an entry remembers of the chains that keep texts."""

from __future__ import annotations

from p2pllm.scheduling import Stage
from p2pllm.serving.entry.affinity import IDLE_S, MAX_TEXTS, NOWHERE, Affinity, Kept

HERE, THERE = (Stage("a", 0, 4), Stage("b", 4, 6)), (Stage("c", 0, 6),)


def names(*blocks: int) -> bytes:
    return b"".join(block.to_bytes(8, "big") for block in blocks)


def test_the_longest_beginning_counts() -> None:
    affinity = Affinity()
    affinity.note(names(1, 2, 3, 4), 40, HERE, 0.0)
    affinity.note(names(1, 2, 3, 4, 5, 6), 70, THERE, 0.0)
    for asked, kept in {
        names(): NOWHERE,
        names(1): NOWHERE,  # nobody ended there
        names(8, 9): NOWHERE,
        names(1, 2): Kept(HERE, 32),  # the first prompt
        names(1, 2, 3): Kept(HERE, 32),
        names(1, 2, 3, 4): Kept(THERE, 64),  # the second one's, of late
        names(1, 2, 3, 4, 9): Kept(THERE, 64),
        names(1, 2, 3, 4, 5, 6, 7): Kept(THERE, 96),
    }.items():
        assert affinity.recall(asked, 1.0) == kept


def test_texts_shorter_than_a_block_leave_nothing() -> None:
    affinity = Affinity()
    affinity.note(b"", 15, HERE, 0.0)
    affinity.note(names(8), 15, HERE, 0.0)
    assert affinity.recall(names(8), 0.0) == Kept(HERE, 16)
    assert len(affinity._chains) == 1


def test_what_nobody_asks_for_is_forgotten() -> None:
    affinity = Affinity()
    affinity.note(names(1, 2), 16, HERE, 0.0)
    affinity.note(names(1, 2), 32, THERE, 10.0)
    assert affinity.recall(names(1, 2), IDLE_S + 9.0) == Kept(THERE, 32)
    assert affinity.recall(names(1), IDLE_S) == Kept(HERE, 16)
    assert affinity.recall(names(1), IDLE_S + 1.0) == affinity.recall(names(1, 2), IDLE_S + 11.0) == NOWHERE
    for number in range(3, MAX_TEXTS + 3):
        affinity.note(names(number), 0, HERE, 20.0)
    assert affinity.recall(names(1, 2), 20.0) == NOWHERE
    assert affinity.recall(names(3), 20.0) == Kept(HERE, 16)


def test_a_detour_is_worth_what_it_saves() -> None:
    kept = Kept(HERE, 200)
    assert kept.is_worth(1.44, 1.0, 100), "at most 1.25 + 0.1 x 200 / 100 times as slow"
    assert not kept.is_worth(1.46, 1.0, 100)
    assert kept.is_worth(21.0, 1.0, 1)
    assert kept.is_worth(0.0, 0.0, 1)
