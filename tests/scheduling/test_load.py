"""Eq 5, windows and the joining of spares: cases worked by hand, and definitions spelled out."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pllm.scheduling import Capacity, Offer, Slice, loads, spread, window
from p2pllm.scheduling.load import coefficient_of_variation, holdable, holder_counts


def offer(peer, capacity, kv_bytes=0, flops=0.0):
    room = capacity if isinstance(capacity, Capacity) else Capacity.same(capacity)
    return Offer(peer, "here", room, 1e-3, kv_bytes=kv_bytes, flops=flops)


def capacities(most):
    """Rooms in which no place exceeds the middle one."""
    return st.integers(0, most).flatmap(
        lambda middle: st.builds(Capacity, st.just(middle), *[st.integers(0, middle)] * 3)
    )


# Loads


def test_loads_worked_by_hand():
    # Of 400 bytes and 40 FLOP/s: a puts 100 and 30 on two layers, b puts 300 and 10 on four.
    cluster = [offer("a", 9, 100, 30.0), offer("b", 9, 300, 10.0)]
    held = [Slice("a", 0, 2), Slice("b", 1, 5)]
    only_a = 0.5 * 50 / 400 + 0.5 * 15 / 40
    only_b = 0.5 * 75 / 400 + 0.5 * 2.5 / 40
    expected = [only_a, only_a + only_b, only_b, only_b, only_b, 0]
    assert loads(6, cluster, held).tolist() == pytest.approx(expected)
    memory_alone = [50 / 400, 125 / 400, 75 / 400, 75 / 400, 75 / 400, 0]
    assert loads(6, cluster, held, alpha=1.0).tolist() == pytest.approx(memory_alone)


def test_spares_count_in_the_totals_only():
    cluster = [offer("a", 9, 100, 10.0), offer("spare", 9, 100, 30.0)]
    assert loads(2, cluster, [Slice("a", 0, 2)]).tolist() == pytest.approx([0.1875, 0.1875])


def test_a_peer_with_several_slices_has_no_more_power():
    cluster = [offer("a", 9, 100, 10.0)]
    assert loads(4, cluster, [Slice("a", 0, 1), Slice("a", 2, 4)]).tolist() == pytest.approx(
        [1 / 3, 0, 1 / 3, 1 / 3]
    )


def test_a_total_of_zero_makes_its_term_zero():
    assert loads(2, [offer("a", 9, 0, 5.0)], [Slice("a", 0, 1)]).tolist() == [0.5, 0]
    assert loads(2, [offer("a", 9)], [Slice("a", 0, 2)]).tolist() == [0, 0]
    assert loads(3, [], []).tolist() == [0, 0, 0]


def test_layers_beyond_the_model_count_for_nothing():
    assert loads(2, [offer("a", 9, 4)], [Slice("a", 1, 5)]).tolist() == pytest.approx([0, 0.125])
    assert holder_counts(2, [Slice("a", 1, 5), Slice("a", 3, 4)]).tolist() == [0, 1]


def test_rounding_does_not_depend_on_the_order():
    # 0.1 + 0.2 + 0.3 is not 0.3 + 0.2 + 0.1.
    cluster = [offer("a", 9, flops=0.1), offer("b", 9, flops=0.2), offer("c", 9, flops=0.3)]
    held = [Slice("a", 0, 1), Slice("b", 0, 1), Slice("c", 0, 1)]
    assert loads(1, cluster, held).tolist() == loads(1, cluster[::-1], held[::-1]).tolist()


def test_a_slice_needs_an_offer():
    with pytest.raises(ValueError, match="peer b holds a slice but offers nothing"):
        loads(2, [offer("a", 9)], [Slice("a", 0, 1), Slice("c", 0, 1), Slice("b", 0, 1)])
    with pytest.raises(ValueError, match="peer b holds a slice but offers nothing"):
        spread(2, [offer("a", 9)], [Slice("b", 0, 1)])


def test_coefficient_of_variation():
    assert coefficient_of_variation(np.array([2.0, 2.0, 2.0])) == 0
    assert coefficient_of_variation(np.array([0.0, 0.0])) == 0
    # Mean 2, deviations 1, 1, 1, 1.
    assert coefficient_of_variation(np.array([1.0, 3.0, 1.0, 3.0])) == pytest.approx(0.5)


@settings(derandomize=True, deadline=None)
@given(st.data(), st.integers(1, 8))
def test_loads_are_equation_5(data, layers):
    peers = data.draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6))
    cluster = [offer(f"p{i}", 9, kv, float(flops)) for i, (kv, flops) in enumerate(peers)]
    bounds = st.integers(0, layers - 1).flatmap(
        lambda start: st.tuples(st.just(start), st.integers(start + 1, layers))
    )
    spans = data.draw(st.lists(st.one_of(st.none(), bounds), min_size=len(peers), max_size=len(peers)))
    held = [Slice(f"p{i}", *span) for i, span in enumerate(spans) if span]

    memory, flops = (sum(column) for column in zip(*peers, strict=True))
    expected = [Fraction(0)] * layers
    for (kv, speed), span in zip(peers, spans, strict=True):
        for layer in range(*span) if span else ():
            length = span[1] - span[0]
            expected[layer] += Fraction(kv, 2 * length * memory) if memory else 0
            expected[layer] += Fraction(speed, 2 * length * flops) if flops else 0
    got = loads(layers, cluster, held)
    assert got.tolist() == pytest.approx([float(value) for value in expected])
    assert loads(layers, cluster[::-1], held[::-1]).tolist() == got.tolist()


# Windows


@pytest.mark.parametrize(
    ("capacity", "lightest", "expected"),
    [
        (Capacity.same(5), 0, (0, 5)),
        (Capacity.same(5), 7, (7, 12)),
        (Capacity.same(5), 15, (15, 20)),
        (Capacity.same(5), 18, (15, 20)),
        (Capacity.same(20), 7, (0, 20)),
        (Capacity.same(99), 19, (0, 20)),
        # Room for embedding or head costs layers.
        (Capacity(5, 3, 2, 1), 0, (0, 3)),
        (Capacity(5, 3, 2, 1), 1, (1, 6)),
        (Capacity(5, 3, 2, 1), 19, (18, 20)),
        (Capacity(5, 3, 2, 1), 17, (14, 19)),
        # The last five layers are a gap: better start at 15 with the head than at 13 without.
        (Capacity(6, 6, 5, 0), 15, (15, 20)),
        # No room for an end: in the middle, as near as can be.
        (Capacity(5, 0, 0, 0), 0, (1, 6)),
        (Capacity(5, 0, 0, 0), 19, (14, 19)),
        (Capacity(99, 0, 0, 0), 4, (1, 19)),
        (Capacity(99, 12, 0, 0), 4, (1, 19)),
        (Capacity(99, 0, 12, 0), 10, (8, 20)),
        (Capacity(0, 0, 0, 0), 4, None),
    ],
)
def test_windows_of_a_model_of_20_layers(capacity, lightest, expected):
    assert window(20, capacity, lightest) == expected


def test_windows_of_tiny_models():
    assert window(1, Capacity.same(1), 0) == (0, 1)
    assert window(1, Capacity(5, 5, 5, 0), 0) is None
    assert window(2, Capacity(5, 5, 5, 1), 1) == (1, 2)
    assert window(2, Capacity(5, 0, 5, 0), 0) == (1, 2)
    assert window(2, Capacity(5, 0, 0, 0), 0) is None


def test_equal_room_everywhere_gives_the_papers_window():
    for layers in range(1, 10):
        for room, lightest in itertools.product(range(1, 12), range(layers)):
            start = min(lightest, layers - min(room, layers))
            assert window(layers, Capacity.same(room), lightest) == (start, min(start + room, layers))


def every_window(layers, room):
    """All slices for which a peer has room."""
    return [
        (start, end)
        for start, end in itertools.combinations(range(layers + 1), 2)
        if end - start <= room.at(is_first=start == 0, is_last=end == layers)
    ]


def test_windows_against_all_that_fit():
    for layers, rooms in itertools.product(range(1, 6), itertools.product(range(6), repeat=4)):
        room = Capacity(*rooms)
        if max(rooms) > room.middle:
            continue
        fitting = every_window(layers, room)
        reached = {layer for span in fitting for layer in range(*span)}
        assert set(holdable(layers, room)) == reached
        for lightest in range(layers):
            span = window(layers, room, lightest)
            if not fitting:
                assert span is None
                continue
            assert span in fitting
            assert (lightest in range(*span)) == (lightest in reached)
            # It goes on for as long as there is room.
            assert (span[0], span[1] + 1) not in fitting


# Spares


def test_spares_join_one_after_the_other_where_it_is_lightest():
    placed = [Slice("a", 0, 4), Slice("b", 4, 10)]
    cluster = [
        offer("a", 9, 60, 60.0),
        offer("b", 9, 60, 60.0),
        offer("small", 2, 20, 20.0),
        offer("big", 6, 60, 60.0),
    ]
    # b's six layers are lighter than a's four; once doubled they are heavier, and a's come next.
    assert spread(10, cluster, placed) == (Slice("big", 4, 10), Slice("small", 0, 2))


def test_layers_without_any_holder_come_first():
    # Nobody has power, so loads say nothing.
    cluster = [offer("a", 3), offer("b", 2), offer("c", 2), offer("none", 0)]
    assert spread(6, cluster, [Slice("a", 0, 3)]) == (Slice("b", 3, 5), Slice("c", 4, 6))


def test_a_spare_without_room_for_the_ends_helps_in_the_middle():
    cluster = [offer("a", 6, 6, 6.0), offer("b", Capacity(2, 0, 0, 0), 6, 6.0)]
    assert spread(6, cluster, [Slice("a", 0, 6)]) == (Slice("b", 1, 3),)
    cluster = [offer("b", Capacity(9, 0, 0, 0))]
    assert spread(6, cluster, []) == (Slice("b", 1, 5),)
    assert spread(2, cluster, []) == ()


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 10))
def test_spreading_is_one_join_at_a_time(data, layers):
    rooms = data.draw(st.lists(capacities(6), min_size=1, max_size=8))
    powers = [data.draw(st.tuples(st.integers(0, 8), st.integers(0, 8))) for _ in rooms]
    cluster = [
        offer(f"p{i}", room, kv, float(speed))
        for i, (room, (kv, speed)) in enumerate(zip(rooms, powers, strict=True))
    ]
    got = spread(layers, cluster, [])
    assert spread(layers, data.draw(st.permutations(cluster)), []) == got

    joined = []
    for spare in sorted(cluster, key=lambda o: o.capacity, reverse=True):
        able = {layer for span in every_window(layers, spare.capacity) for layer in range(*span)}
        if able:
            load = loads(layers, cluster, joined)
            # Rounding decides between layers of equal load.
            lightest = [layer for layer in able if load[layer] <= min(load[list(able)]) + 1e-12]
            joined.append(got[len(joined)])
            assert joined[-1].peer == spare.peer
            assert (joined[-1].start, joined[-1].end) in {
                window(layers, spare.capacity, layer) for layer in lightest
            }
    assert tuple(joined) == got
