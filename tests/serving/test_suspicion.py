"""What silence means: a clock that is told the time, and stages that answer or do not."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from p2pllm.serving.entry.suspicion import ANSWER_S, Ask, Suspect, Suspicion, Wait

WORK = (0.01, 0.02, 0.01)
STEP_S = 0.05
FED = 20


class Chain:
    """Three stages; ``answers`` says what each answers when asked, None: nothing."""

    def __init__(self, work: tuple[float, ...] = WORK, step_s: float = STEP_S) -> None:
        self.now = 100.0
        self.suspicion = Suspicion(work, step_s, FED, self.now)
        self.answers: list[tuple[int, float] | None] = [(FED, 0.01)] * len(work)
        self.asked = 0
        self.fed = FED

    def run(self, seconds: float) -> Suspect | None:
        """Let time pass; returns the first suspect."""
        end = self.now + seconds
        while self.now < end:
            look = self.suspicion.look(self.now)
            if isinstance(look, Suspect):
                return look
            if isinstance(look, Ask):
                self.asked += 1
                for stage, answer in enumerate(self.answers):
                    if answer is not None:
                        self.suspicion.answer(stage, *answer, self.now + 0.001)
                continue
            assert look.seconds > 0
            self.now = min(end, self.now + look.seconds)
        return None

    def decode(self, seconds: float, interval_s: float) -> Suspect | None:
        """Have a token come at every interval."""
        end = self.now + seconds
        while self.now < end:
            found = self.run(interval_s)
            if found is not None:
                return found
            self.suspicion.token(self.now)
            self.fed += 1
            self.answers = [None if it is None else (self.fed, it[1]) for it in self.answers]
        return None


def test_while_tokens_come_in_time_nobody_is_asked() -> None:
    chain = Chain()
    assert chain.decode(10, STEP_S) is None
    assert chain.asked == 0
    assert abs(chain.suspicion.interval_s - STEP_S) < 1e-6


@given(st.integers(0, 2), st.floats(0.001, 0.3))
@settings(max_examples=30)
def test_who_does_not_answer_is_found_in_time(frozen: int, step_s: float) -> None:
    chain = Chain(step_s=step_s)
    assert chain.decode(2, step_s) is None
    chain.answers[frozen] = None
    began = chain.now
    found = chain.run(10)
    assert found == Suspect((frozen,), "no sign of life")
    assert chain.now - began <= max(0.3, min(1.0, 5 * step_s)) + ANSWER_S + 0.01


def test_several_that_do_not_answer_are_found_together() -> None:
    chain = Chain()
    chain.answers[0] = chain.answers[2] = None
    found = chain.run(10)
    assert found is not None
    assert found.stages == (0, 2)


def test_a_token_clears_all_that_were_asked() -> None:
    chain = Chain()
    chain.answers = [None, None, None]
    assert chain.run(0.4) is None
    assert chain.asked == 1
    chain.suspicion.token(chain.now)
    assert chain.run(ANSWER_S) is None


def test_slow_is_not_dead_while_it_gets_on() -> None:
    chain = Chain()
    for position in range(1, 30):
        chain.answers = [(position, 2.0), (position, 0.0), (position - 1, 0.0)]
        found = chain.run(2.9)
        assert found is None or found.is_slow


def test_the_first_that_has_work_and_does_not_get_on_is_stuck() -> None:
    for stuck in range(3):
        chain = Chain(work=(1.0, 1.0, 1.0))
        chain.decode(1, STEP_S)
        chain.answers = [(chain.fed - (stage >= stuck), 0.0) for stage in range(3)]
        found = chain.run(20)
        assert found is not None
        assert found.stages == (stuck,)
        assert not found.is_slow
    # All have run everything, and no token came of it.
    chain = Chain()
    chain.decode(1, STEP_S)
    chain.answers = [(chain.fed, 0.0)] * 3
    found = chain.run(20)
    assert found is not None
    assert found.stages == (2,)


def test_a_prompt_may_wait_longer_than_a_token() -> None:
    chain = Chain()
    chain.answers = [(0, 0.0)] * 3
    assert chain.run(9.5) is None
    assert chain.run(2) is not None


def test_a_straggler_is_found_after_two_seconds() -> None:
    chain = Chain()
    chain.decode(5, STEP_S)
    chain.answers[1] = (0, 0.11)
    began = chain.now
    found = chain.decode(10, 0.2)
    assert found is not None
    assert (found.stages, found.is_slow) == ((1,), True)
    assert 2.0 <= chain.now - began < 3.5
    chain.suspicion.pardon(chain.now + 5)
    assert chain.decode(4.5, 0.2) is None
    assert chain.decode(2, 0.2) is not None


def test_where_all_are_slow_it_is_the_load() -> None:
    chain = Chain()
    chain.answers = [(0, 0.11), (0, 0.22), (0, 0.08)]
    assert chain.decode(10, 0.4) is None
    assert chain.asked > 5


def test_the_load_is_what_makes_most_stages_slow() -> None:
    chain = Chain()
    assert chain.suspicion.load == 1.0
    for step_s, load in ((0.03, 3.0), (0.005, 1.0)):
        chain.answers = [(FED, step_s), (FED, 1.0), (FED, step_s)]
        chain.run(2)
        assert chain.suspicion.load == load


def test_who_is_slow_for_a_moment_is_no_straggler() -> None:
    chain = Chain()
    for _ in range(5):
        chain.answers[1] = (0, 0.2)
        assert chain.decode(1.5, 0.3) is None
        chain.answers[1] = (0, 0.02)
        assert chain.decode(1.5, 0.3) is None


def test_who_was_slow_once_and_then_waits_for_another_is_no_straggler() -> None:
    chain = Chain()
    chain.decode(5, STEP_S)
    chain.answers = [(chain.fed - 1, 0.01), (chain.fed - 1, 0.3), (chain.fed - 1, 0.01)]
    assert chain.run(2.9) is None


def test_an_entry_that_was_held_up_itself_blames_nobody() -> None:
    chain = Chain()
    chain.answers = [None, None, None]
    assert chain.run(0.35) is None
    assert chain.asked == 1
    chain.now += 3.0  # the process was stopped; answers lie in its sockets
    assert isinstance(chain.suspicion.look(chain.now), Wait)
    for stage in range(3):
        chain.suspicion.answer(stage, FED, 0.0, chain.now)
    assert not isinstance(chain.suspicion.look(chain.now), Suspect)
