"""Which layers nobody holds or a single peer, against asking layer by layer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2pllm.scheduling import Holder, sole_holders, uncovered

LAYERS = 9
SPANS = st.builds(
    lambda peer, start, size, leaving: Holder(peer, start, start + size, 1e-3, leaving=leaving),
    st.sampled_from("abc"),
    st.integers(0, LAYERS + 1),
    st.integers(1, LAYERS),
    st.booleans(),
)


def ranges_of(values):
    """Maximal ranges of equal values that are not None."""
    found = []
    for layer, value in enumerate(values):
        if value is not None and found and found[-1][1:] == (layer, value):
            found[-1] = (found[-1][0], layer + 1, value)
        elif value is not None:
            found.append((layer, layer + 1, value))
    return tuple(found)


@given(st.lists(SPANS, max_size=6))
def test_layer_by_layer(holders):
    peers = [
        sorted({h.peer for h in holders if h.start <= layer < h.end and not h.leaving})
        for layer in range(LAYERS)
    ]
    assert sole_holders(LAYERS, holders) == ranges_of([p[0] if len(p) == 1 else None for p in peers])
    missing = ranges_of([None if p else "nobody" for p in peers])
    assert uncovered(LAYERS, holders) == tuple((start, end) for start, end, _ in missing)


def test_spans_of_one_peer_are_one_holder():
    holders = [Holder("a", 0, 4, 1e-3), Holder("a", 2, 6, 1e-3), Holder("b", 5, 8, 1e-3)]
    assert sole_holders(8, holders) == ((0, 5, "a"), (6, 8, "b"))
    assert sole_holders(8, []) == ()
    assert uncovered(8, []) == ((0, 8),)
