"""Make before break: swaps, chains of moves, and any plan at all without a layer ever uncovered."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.moving import after, single_layers

from p2pllm.scheduling import Capacity, Moves, Slice, safe_moves
from p2pllm.scheduling.load import holder_counts


def slices(**spans):
    """a=(0, 3) is a slice; a=[(0, 1), (2, 3)] are two."""
    return [
        Slice(peer, *one)
        for peer, span in spans.items()
        for one in (span if isinstance(span, list) else [span])
    ]


def rooms(**layers):
    return {peer: Capacity.same(room) for peer, room in layers.items()}


def test_what_fits_beside_the_old_is_loaded_first_and_the_old_dropped_later():
    held, target = slices(a=(0, 4), b=(0, 4)), slices(a=(2, 6))
    assert safe_moves(6, held, target, rooms(a=6)) == Moves((Slice("a", 4, 6),), (), ())
    held = slices(a=(0, 6), b=(0, 4))
    assert safe_moves(6, held, target, rooms(a=6)) == Moves((), (Slice("a", 0, 2),), ())


def test_the_only_holder_keeps_what_it_should_not_have_any_more():
    held, target = slices(a=(0, 6), b=(0, 1)), slices(a=(2, 6), b=(0, 2))
    # b has room for two: it loads, and only then a drops.
    assert safe_moves(6, held, target, rooms(a=6, b=2)) == Moves((Slice("b", 1, 2),), (), ())
    held = slices(a=(0, 6), b=(0, 2))
    assert safe_moves(6, held, target, rooms(a=6, b=2)) == Moves((), (Slice("a", 0, 2),), ())


def test_without_room_for_both_the_old_goes_first_if_others_hold_it():
    target = slices(a=(2, 4))
    assert safe_moves(4, slices(a=(0, 2), b=(0, 2)), target, rooms(a=2)) == Moves((), (Slice("a", 0, 2),), ())
    assert safe_moves(4, slices(a=(0, 2), b=(0, 1)), target, rooms(a=2)) == Moves((), (), tuple(target))


def test_what_old_and_new_share_is_neither_dropped_nor_loaded():
    target = slices(a=(2, 8))
    assert safe_moves(9, slices(a=(0, 6), b=(0, 2)), target, rooms(a=6)) == Moves((), (Slice("a", 0, 2),), ())
    assert safe_moves(9, slices(a=(2, 6), b=(0, 2)), target, rooms(a=6)) == Moves((Slice("a", 6, 8),), (), ())


def test_two_full_sole_holders_cannot_swap_unless_forced():
    held, target = slices(a=(0, 2), b=(2, 4)), slices(a=(2, 4), b=(0, 2))
    assert safe_moves(4, held, target, rooms(a=2, b=2)) == Moves((), (), (target[1], target[0]))
    forced = safe_moves(4, held, target, rooms(a=2, b=2), force=True)
    assert forced == Moves((), (held[1], held[0]), ())
    assert safe_moves(4, [], target, rooms(a=2, b=2)) == Moves((target[1], target[0]), (), ())
    # One that has room for both makes way for the other.
    assert safe_moves(4, held, target, rooms(a=2, b=4)) == Moves((target[1],), (), (target[0],))


def test_force_breaks_only_what_is_in_the_way():
    held, target = slices(a=(0, 4), b=(4, 6)), slices(a=(0, 2), b=(4, 6))
    assert safe_moves(6, held, target, rooms(a=4, b=2), force=True) == Moves((), (), ())


def test_of_two_holders_only_one_drops():
    held, target = slices(a=(0, 2), b=(0, 2)), slices(a=(2, 4), b=(2, 4))
    assert safe_moves(4, held, target, rooms(a=2, b=2)) == Moves((), (Slice("b", 0, 2),), (target[0],))


def test_ends_count_where_old_and_new_lie():
    # Three middle layers fit, two beside the embedding, one beside embedding and head.
    room = {"a": Capacity(3, 2, 2, 1)}
    assert safe_moves(9, slices(a=(3, 5)), slices(a=(5, 6)), room).load == (Slice("a", 5, 6),)
    assert safe_moves(9, slices(a=(1, 3)), slices(a=(0, 1)), room).blocked == (Slice("a", 0, 1),)
    assert safe_moves(9, slices(a=(0, 1)), slices(a=(8, 9)), room).blocked == (Slice("a", 8, 9),)
    assert safe_moves(9, slices(a=(0, 1)), slices(a=(7, 8)), room).load == (Slice("a", 7, 8),)


def test_a_slice_that_never_fits_costs_nothing():
    held, target = slices(a=(0, 2), b=(0, 4)), slices(a=(1, 4))
    assert safe_moves(4, held, target, rooms(a=2), force=True) == Moves((), (), tuple(target))


def test_newcomers_load_and_peers_outside_the_plan_stay():
    held, target = slices(a=(0, 4)), slices(b=(1, 4))
    assert safe_moves(4, held, target, rooms(b=3)) == Moves((Slice("b", 1, 4),), (), ())
    assert safe_moves(4, held + target, target, rooms(b=3)) == Moves((), (), ())
    assert safe_moves(4, [], [], {}) == Moves((), (), ())


LAYERS = 6
spans = st.integers(0, LAYERS - 1).flatmap(
    lambda start: st.tuples(st.just(start), st.integers(start + 1, LAYERS))
)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(spans, st.one_of(st.none(), spans), st.integers(0, 3)), min_size=1, max_size=6),
    st.booleans(),
)
def test_steps_end_and_never_uncover_a_layer(peers, force):
    names = [f"p{i}" for i in range(len(peers))]
    held = single_layers([Slice(name, *old) for name, (old, _, _) in zip(names, peers, strict=True)])
    target = [Slice(name, *new) for name, (_, new, _) in zip(names, peers, strict=True) if new]
    room = {
        name: Capacity.same(max(old[1] - old[0], new[1] - new[0]) + more) if new else Capacity.same(0)
        for name, (old, new, more) in zip(names, peers, strict=True)
    }
    covered = holder_counts(LAYERS, held) > 0
    steps = 0
    while (moves := safe_moves(LAYERS, held, target, room, force=force)).load or moves.drop:
        steps += 1
        assert steps <= 2 * LAYERS * len(peers)
        held = after(held, moves)
        for name in {piece.peer for piece in target}:
            assert sum(piece.peer == name for piece in held) <= room[name].middle
        if not force:
            assert (holder_counts(LAYERS, held) > 0)[covered].all()

    goals = {piece.peer: set(range(piece.start, piece.end)) for piece in target}
    stuck = {piece.peer for piece in moves.blocked}
    for peer, goal in goals.items():
        owned = {piece.start for piece in held if piece.peer == peer}
        assert (peer in stuck) == (not goal <= owned)
        # What it has beyond its goal is there because nobody else has all of it.
        surplus = sorted(owned - goal)
        assert not surplus or (holder_counts(LAYERS, held)[surplus] == 1).any()
    if force:
        assert not stuck


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.permutations(range(5)), st.integers(0, 4))
def test_a_free_peer_sets_a_ring_of_sole_holders_going(new, free):
    """Five full stages in another order: a helper that holds one of them frees all that wait in turn."""
    held = [Slice(f"p{i}", 2 * i, 2 * i + 2) for i in range(5)]
    target = [Slice(f"p{i}", 2 * j, 2 * j + 2) for i, j in enumerate(new)]
    helper = Slice("helper", 2 * free, 2 * free + 2)
    room = {piece.peer: Capacity.same(2) for piece in [*target, helper]}
    for _ in range(12):
        moves = safe_moves(10, held, [*target, helper], room)
        held = after(held, moves)
        assert holder_counts(10, held).all()
    ring = {free}
    while (following := new[free]) not in ring:
        ring.add(following)
        free = following
    assert moves.blocked == tuple(target[i] for i in reversed(range(5)) if i not in ring and new[i] != i)
