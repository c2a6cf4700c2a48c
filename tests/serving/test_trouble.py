"""What a request learns of what befalls it, and how long it remembers."""

from __future__ import annotations

import pytest

from p2pllm.serving.entry.trouble import StageLostError, Trouble, problem_of
from p2pllm.transport import Failed

A, B, C, D = ("a" * 40, "b" * 40, "c" * 40, "d" * 40)


@pytest.mark.parametrize(
    ("cause", "peer", "means"),
    [
        ("broken", "", ({A}, "lost", None)),
        ("busy", "", ({A}, "busy", None)),
        ("leaving", "", ({A}, "leaving", None)),
        ("unreached", B, (set(), "lost", (A, B))),
        ("cut", B, (set(), "cut", (A, B))),
        ("cut", C, ({A}, "lost", None)),
        ("unreached", C, ({A}, "lost", None)),  # no neighbour of its
    ],
)
def test_what_a_stage_says_of_itself(cause: str, peer: str, means: tuple[object, ...]) -> None:
    problem = problem_of(Failed("s", 0, 0, cause, "because", peer), A, {B})
    assert (problem.peers, problem.cause, problem.hop) == means
    assert "because" in str(problem)


def test_who_failed_is_avoided_for_a_moment() -> None:
    trouble = Trouble()
    trouble.note(StageLostError({A}, "gone"), 10.0)
    trouble.note(StageLostError({B}, "leaving", cause="leaving"), 10.0)
    trouble.note(StageLostError({C}, "full", cause="busy"), 10.0)
    assert trouble.avoided(10.9) == {A, B, C}
    trouble.forgive("busy")
    assert trouble.avoided(10.9) == {A, B}
    assert trouble.avoided(11.1) == {B}


def test_complaints_sever_a_hop_in_both_directions() -> None:
    trouble = Trouble()
    trouble.note(StageLostError((), "no link", hop=(A, B)), 10.0)
    assert trouble.avoided(10.0) == set()
    assert trouble.complaints(10.5) == {(A, B)}
    assert trouble.severed(10.5) == {(A, B), (B, A)}
    assert trouble.severed(11.1) == set()


def test_a_link_that_was_cut_may_be_tried_again_but_not_for_ever() -> None:
    trouble = Trouble()
    for _ in range(2):
        problem = StageLostError((), "the link broke", cause="cut", hop=(A, B))
        assert trouble.note(problem, 10.0) is problem
        assert not trouble.avoided(10.0) | trouble.severed(10.0)
    assert trouble.note(problem, 10.0).peers == {A}


def test_who_complains_of_everybody_is_the_problem() -> None:
    trouble = Trouble()
    for accused in (B, C):
        assert trouble.note(StageLostError((), "no link", hop=(A, accused)), 10.0).peers == set()
    assert trouble.note(StageLostError((), "no link", hop=(A, D)), 10.0).peers == {A}
    assert trouble.avoided(10.5) == {A}


def test_complaints_of_the_dead_and_of_long_ago_prove_nothing() -> None:
    trouble = Trouble()
    trouble.note(StageLostError({B}, "gone"), 10.0)
    for _ in range(5):
        trouble.note(StageLostError((), "no link", hop=(A, B)), 10.5)
    for _ in range(5):
        trouble.note(StageLostError((), "no link", hop=(A, C)), 10.5)
        trouble.calm()
    assert A not in trouble.avoided(10.5)


def test_who_is_gone_was_not_behind_a_broken_hop() -> None:
    trouble = Trouble()
    trouble.note(StageLostError((), "no link", hop=(A, B)), 10.0)
    trouble.note(StageLostError((), "no link", hop=(C, D)), 10.0)
    trouble.note(StageLostError({B}, "gone"), 10.0)
    assert trouble.complaints(10.0) == {(C, D)}
