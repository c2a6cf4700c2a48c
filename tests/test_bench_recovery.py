"""``bench recovery``: how it counts and what it prints; that it runs at all is for the slow tests."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.models import save_tiny_model

from p2pllm.bench.recovery_judge import Judge, parting, tied
from p2pllm.bench.recovery_loss import covers, in_role
from p2pllm.bench.recovery_report import aims_of
from p2pllm.bench.recovery_runs import Run, Summary, longest_wait
from p2pllm.bench.recovery_swarm import slices
from p2pllm.bench.rival import Rival
from p2pllm.bench.spread import Spread
from p2pllm.cli import main
from p2pllm.execution import SamplingParams, open_checkpoint
from p2pllm.execution.sampler import uniform

RUN = Run(
    role="first",
    chain=3,
    frozen=False,
    struck=5,
    failure="",
    identical=True,
    parted=None,
    pause_s=0.2,
    recomputed=100,
    lost=200,
    ttft_s=0.5,
    next_ttft_s=0.6,
)
RUNS = [
    RUN,
    replace(RUN, role="middle", pause_s=0.4, recomputed=50, parted=7),
    replace(RUN, role="last", frozen=True, pause_s=1.2, recomputed=None, lost=0, identical=False, parted=3),
    replace(RUN, failure="no way on", identical=False, pause_s=9.0, recomputed=7, ttft_s=0.7),
]


def test_a_summary_worked_by_hand() -> None:
    """Pauses and costs are those of complete answers; one that parts at a near tie is the same."""
    assert Summary.of(RUNS) == Summary(
        runs=4,
        completed=3,
        identical=2,
        near_ties=1,
        pause_s=Spread(0.3, 0.4),
        freeze_pause_s=Spread(1.2, 1.2),
        recomputed_layer_tokens=Spread(75, 100),
        recomputed_share=0.375,
        next_ttft_ratio=1.2,
    )


def test_what_was_not_measured_is_not_made_up() -> None:
    summary = Summary.of([replace(RUN, recomputed=None, lost=0, next_ttft_s=None)])
    assert summary.recomputed_layer_tokens is summary.recomputed_share is summary.next_ttft_ratio is None
    assert summary.freeze_pause_s is None
    assert [aim.name for aim, _ in aims_of(summary)][2:] == [
        "pause after a kill, median s",
        "pause after a kill, p99 s",
    ]


@pytest.mark.parametrize(
    ("since", "wait"), [(0, 3.0), (1, 3.0), (2, 3.0), (3, 2.0), (4, 0.5), (5, 0.0), (9, 0.0)]
)
def test_the_longest_wait_from_the_loss_on(since: int, wait: float) -> None:
    """The third piece comes 3 s after the second: whoever lost a peer after two pieces waited for it."""
    assert longest_wait([0.0, 1.0, 4.0, 6.0, 6.5], since) == wait


def test_who_is_in_which_role() -> None:
    peers: list[Any] = [SimpleNamespace(name=name) for name in "abcd"]
    assert [in_role(peers[:3], role) for role in ("first", "middle", "last")] == peers[:3]
    assert [in_role(peers[:2], role) for role in ("first", "middle", "last")] == [peers[0], None, peers[1]]
    assert [in_role(peers[:1], role) for role in ("first", "middle", "last")] == [peers[0], None, None]


def test_every_layer_is_held_twice() -> None:
    parts = slices(30, 8)
    assert [(part.start, part.stop) for part in parts] == 2 * [(0, 13), (13, 25), (25, 30)]
    assert all(sum(layer in part for part in parts) == 2 for layer in range(30))


def test_a_chain_is_seen_when_it_covers_all_layers() -> None:
    assert covers([range(13), range(13, 25), range(25, 30)], 30)
    assert covers([range(19), range(13, 25), range(19, 30)], 30)
    assert not covers([range(13), range(13, 25)], 30)
    assert not covers([range(13), range(25, 30)], 30)
    assert not covers([range(13, 25), range(25, 30)], 30)
    assert not covers([], 30)


def test_where_answers_part() -> None:
    assert parting([1, 2, 3], [1, 2, 3]) is None
    assert parting([1, 2, 3], [1, 5, 3]) == 1
    assert parting([1, 2], [1, 2, 3]) == 2
    assert parting([], [4]) == 0


@pytest.mark.parametrize(("gap", "may"), [(0.0, True), (0.0009, True), (0.0011, False)])
def test_near_ties_of_greedy_tokens(gap: float, may: bool) -> None:
    logits = np.array([0.0, 3.0, 3.0 - gap])
    assert tied(logits, 1, 0.0, 0.5)
    assert tied(logits, 2, 0.0, 0.5) is may
    assert not tied(logits, 0, 0.0, 0.5)


@pytest.mark.parametrize(
    ("chance", "may"),
    [
        (0.1, [True, False, False]),
        (0.2495, [True, True, False]),
        (0.4, [False, True, False]),
        (0.7509, [False, True, True]),
        (0.752, [False, False, True]),
    ],
)
def test_near_ties_of_drawn_tokens(chance: float, may: list[bool]) -> None:
    """At temperature 0.5 the shares of these logits are a quarter, a half and a quarter."""
    logits = np.array([0.0, math.log(2) / 2, 0.0])
    assert [tied(logits, token, 0.5, chance) for token in range(3)] == may


def test_the_judge_asks_transformers(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(save_tiny_model(tmp_path / "tiny")))
    prompt, judge = [3, 1, 4, 1, 5], Judge(checkpoint)
    first, second = Rival(checkpoint, 1).best([*prompt, 9])[-2:]
    greedy = SamplingParams(0.0)
    assert judge.allows(prompt, [first, 7], [first, 7], greedy)
    assert judge.allows([*prompt, 9], [second, 7], [second, 7, 8], greedy) is False
    other = (first + 1) % checkpoint.vocabulary
    assert not judge.allows(prompt, [first], [other], greedy)
    # So hot that all tokens are as likely: what is drawn is where the uniform says, and nothing else.
    hot = SamplingParams(1000.0, seed=5)
    drawn = int(uniform(5, len(prompt)) * checkpoint.vocabulary)
    near = [token for token in range(checkpoint.vocabulary) if judge.allows(prompt, [drawn], [token], hot)]
    assert drawn in near
    assert all(abs(token - drawn) <= 1 + 1e-3 * checkpoint.vocabulary for token in near)


def test_a_table_and_an_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    async def measured(bench: Any) -> AsyncIterator[Run]:
        asked.append(bench)
        for run in RUNS:
            yield run

    monkeypatch.setattr("p2pllm.bench.recovery.measure_recovery", measured)
    assert main(["bench", "recovery", "--json", "--quick", "--tokens", "20"]) == 0
    out, err = capsys.readouterr()
    printed = json.loads(out)
    assert (asked[0].runs, asked[0].tokens) == (9, 20)
    assert (printed["runs"], printed["completed"], printed["identical"]) == (4, 3, 2)
    assert printed["pause_s"] == {"median": 0.3, "p99": 0.4}
    assert (printed["recomputed_layer_tokens"]["p99"], printed["next_ttft_ratio"]) == (100, 1.2)
    assert [row["role"] for row in printed["rows"]] == ["first", "middle", "last", "first"]
    lines = [line.split() for line in err.splitlines()[-4:]]
    assert lines[1] == ["middle", "3,", "killed", "5", "tie", "0.40", "50", "of", "200", "0.50", "0.60"]
    assert lines[3][-3:] == ["no", "way", "on"]
    assert main(["bench", "recovery", "--runs", "4"]) == 0
    assert "complete answers, of all: 0.75, aim at least 1: missed" in capsys.readouterr().out
    assert asked[1].runs == 4


def test_too_short_an_answer() -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "recovery", "--tokens", "15"])


@pytest.mark.slow
def test_three_losses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "recovery", "--json", "--runs", "3", "--tokens", "16"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["runs"], printed["completed"], printed["identical"]) == (3, 3, 3)
    assert printed["pause_s"]["median"] > 0
