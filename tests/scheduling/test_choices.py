"""What an entry chose counts until the peer speaks again, or three seconds."""

from __future__ import annotations

from p2pllm.scheduling import Choices


def test_choices_add_up_until_a_newer_record_arrives():
    choices = Choices()
    assert choices.waits(0.0) == {}
    choices.add({"a": 0.25, "b": 0.5}, 10.0)
    choices.add({"a": 0.125}, 11.0)
    assert choices.waits(11.0) == {"a": 0.375, "b": 0.5}
    choices.heard("a", 9.0)
    choices.heard("stranger", 11.0)
    assert choices.waits(11.0) == {"a": 0.375, "b": 0.5}, "an older record does not know of them"
    choices.heard("a", 10.5)
    assert choices.waits(11.0) == {"a": 0.125, "b": 0.5}
    choices.heard("b", 10.0)
    assert choices.waits(11.0) == {"a": 0.125}


def test_choices_die_after_two_publishing_periods():
    choices = Choices()
    choices.add({"a": 0.25}, 10.0)
    choices.add({"a": 0.5}, 12.0)
    assert choices.waits(12.9) == {"a": 0.75}
    assert choices.waits(13.0) == {"a": 0.5}
    assert choices.waits(15.0) == {}
