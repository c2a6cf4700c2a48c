"""Stop strings: the text before the first one, whatever the pieces it arrives in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2pllm.serving.front.completion import StopScanner

letters = st.text("ab", max_size=12)


def first_stop(text: str, stop: list[str]) -> int | None:
    """Where a reader of the whole text would cut, one letter at a time."""
    for end in range(len(text) + 1):
        starts = [end - len(word) for word in stop if text[:end].endswith(word)]
        if starts:
            return min(starts)
    return None


@given(pieces=st.lists(letters, max_size=8), stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_the_scanner_cuts_where_a_reader_would(pieces: list[str], stop: list[str]) -> None:
    scanner = StopScanner(tuple(stop))
    seen = ""
    for piece in pieces:
        seen += scanner.push(piece)
        if scanner.found:
            break
    seen += scanner.flush()
    whole = "".join(pieces)
    cut = first_stop(whole, stop)
    assert scanner.found == (cut is not None)
    assert seen == (whole if cut is None else whole[:cut])


def test_what_may_become_a_stop_string_is_held_back() -> None:
    scanner = StopScanner(("\n\n",))
    assert scanner.push("one\n") == "one"
    assert scanner.push("two") == "\ntwo"
    assert scanner.push("\n\nthree") == ""
    assert scanner.found
    assert scanner.flush() == ""
