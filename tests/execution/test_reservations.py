"""Who has which blocks: sessions and the prefix cache, against a model of what each block holds."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from p2pllm.errors import BusyError, SessionError
from p2pllm.execution.reservations import Reservation, Reservations

NAMES = [bytes([n]) * 8 for n in range(8)]


def made(blocks: int = 100, layers: int = 2, windows: dict[int, int | None] | None = None) -> Reservations:
    kv = Reservations()
    kv.windows = windows or {}
    kv.resize(blocks, layers)
    return kv


def test_a_prefix_is_found_again_by_its_owner_and_layers() -> None:
    kv = made()
    first = kv.open(0, 2, 64, "me", NAMES[:3])
    assert first.shared == 0
    table = first.tables[None].tolist()
    kv.close(first, NAMES[:3], tokens=47)  # the third block is not full
    assert (kv.free, kv.cached) == (100, 4)
    for start, end, owner in ((0, 2, "you"), (0, 1, "me")):
        other = kv.open(start, end, 64, owner, NAMES)
        assert other.shared == 0
        kv.close(other, [], 0)
    again = kv.open(0, 2, 64, "me", NAMES)
    assert (again.shared, kv.cached) == (2, 0)
    assert again.tables[None].tolist()[:2] == table[:2]
    assert kv.free == 100 - 2 * 4
    beside = kv.open(0, 2, 16, "me", NAMES)
    assert (beside.shared, beside.tables[None].tolist()) == (1, table[:1])
    kv.close(again, [], 64)
    kv.close(beside, [], 16)
    assert (kv.free, kv.cached, kv.pool.free) == (100, 4, 96)


def test_what_is_cached_goes_when_there_is_need_the_ends_first() -> None:
    kv = made(blocks=8, layers=1)
    for owner in "ab":
        kv.close(kv.open(0, 1, 64, owner, []), NAMES[:4], 64)
    assert (kv.free, kv.cached, kv.pool.free) == (8, 8, 0)
    kv.close(kv.open(0, 1, 64, "a", NAMES[:4]), [], 64)  # so b is the longest unused
    held = kv.open(0, 1, 48, "c", [])
    assert kv.open(0, 1, 16, "b", NAMES[:4]).shared == 1
    assert kv.open(0, 1, 64, "a", NAMES[:4]).shared == 4
    with pytest.raises(BusyError, match="1 blocks wanted, 0 of 8 free"):
        kv.open(0, 1, 16, "c", [])
    kv.close(held, [], 0)
    assert kv.free == 3


def test_a_shared_block_is_copied_before_it_is_written() -> None:
    kv = made(layers=1)
    kv.close(kv.open(0, 1, 48, "me", []), NAMES[:3], 48)
    one, two = (kv.open(0, 1, 48, "me", NAMES[:3]) for _ in range(2))
    before = one.tables[None].tolist()
    assert kv.go_to(two, 48) == []
    copies = kv.go_to(one, 20)
    after = one.tables[None].tolist()
    assert after[0] == before[0]
    assert not set(after[1:]) & set(before)
    assert copies == [((0,), before[1], after[1]), ((0,), before[2], after[2])]
    assert two.tables[None].tolist() == before
    assert kv.go_to(one, 17) == []
    kv.close(one, NAMES[:3], 48)
    kv.close(two, NAMES[:3], 48)
    assert (kv.free, kv.cached) == (100, 3)


def test_layers_with_a_window_keep_little_more_than_it() -> None:
    kv = made(blocks=10_000, layers=3, windows={0: None, 1: 32, 2: 32})
    session = kv.open(0, 3, 4000, "me", [])
    assert {window: len(table) for window, table in session.tables.items()} == {None: 250, 32: 18}
    for position in range(0, 4000, 50):
        kv.leave_behind(session, position)
        kv.extend(session, 4000, at_once=position + 50)
    assert (session.tables[32] >= 0).sum() <= (32 + 256 + 50) // 16 + 2
    assert kv.go_to(session, 3950) == kv.go_to(session, 3800) == []
    with pytest.raises(SessionError, match="out of a window"):
        kv.go_to(session, 3000)
    kv.close(session, NAMES, 4000)
    assert (kv.free, kv.cached) == (10_000, 0)


def test_dropped_layers_leave_nothing_cached() -> None:
    kv = made(layers=4)
    for start, end in ((0, 2), (1, 4), (2, 4)):
        kv.close(kv.open(start, end, 32, "me", []), NAMES[:2], 32)
    kv.forget([1])
    assert (kv.cached, kv.pool.free) == (4, 96)
    assert kv.pool.heights() == {2: 2, 3: 2}


@dataclass
class Modelled:
    """A session, and what it has written."""

    reservation: Reservation
    text: list[int]


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_sessions(seed: int) -> None:
    """Nobody ever finds a block changed by another, and none is lost.

    Texts are over two symbols, so many begin alike. Memory is a dictionary of (layer, block, slot).
    """
    rng = random.Random(seed)
    windows: dict[int, int | None] = {0: None, 1: None if seed % 2 else 40}
    kv = made(blocks=60, layers=2, windows=windows)
    memory: dict[tuple[int, int, int], tuple[int, ...]] = {}
    sessions: list[Modelled] = []

    def names(text: list[int]) -> list[bytes]:
        ends = range(16, len(text) + 1, 16)
        return [hash((0, *text[:end])).to_bytes(8, "big", signed=True) for end in ends]

    def check(it: Modelled, position: int) -> None:
        """All that the token at ``position`` sees is there."""
        for window, table in it.reservation.tables.items():
            first = 0 if window is None else max(0, position - window + 1)
            for at in range(first, position):
                for layer in it.reservation.layers[window]:
                    assert memory[layer, int(table[at // 16]), at % 16] == tuple(it.text[: at + 1])

    def write(it: Modelled, position: int, tokens: list[int]) -> None:
        end = position + len(tokens)
        try:
            for layers, source, target in kv.go_to(it.reservation, position):
                for layer in layers:
                    for slot in range(16):
                        if (layer, source, slot) in memory:
                            memory[layer, target, slot] = memory[layer, source, slot]
            kv.leave_behind(it.reservation, position)
            kv.extend(it.reservation, end, at_once=end)
        except (BusyError, SessionError):
            return
        it.text[position:] = tokens
        check(it, position)
        for at in range(position, end):
            for window, table in it.reservation.tables.items():
                for layer in it.reservation.layers[window]:
                    memory[layer, int(table[at // 16]), at % 16] = tuple(it.text[: at + 1])

    for _ in range(400):
        act = rng.random()
        if act < 0.3:
            text = [rng.randrange(2)] * 16 + [rng.randrange(2)] * 16 + [7] * rng.randrange(1, 40)
            try:
                reservation = kv.open(0, 2, len(text), rng.choice("ab"), names(text))
            except BusyError:
                continue
            cached = reservation.shared * 16
            it = Modelled(reservation, text[:cached])
            sessions.append(it)
            check(it, cached)
            start = rng.randrange(min(cached, len(text) - 1) + 1)
            write(it, start, text[start:])
        elif sessions and act < 0.75:
            it = rng.choice(sessions)
            position = max(0, len(it.text) - rng.choice([0, 0, 0, 5, 30]))
            write(it, position, [rng.randrange(3) for _ in range(rng.choice([1, 1, 20]))])
        elif sessions:
            it = sessions.pop(rng.randrange(len(sessions)))
            kv.close(it.reservation, names(it.text), len(it.text))
        assert kv.pool.free >= 0
        assert 0 <= kv.cached <= 60
    for it in sessions:
        kv.close(it.reservation, [], 0)
    assert kv.free == 60
    kv.forget([0, 1])
    assert (kv.cached, kv.pool.free) == (0, 60)
