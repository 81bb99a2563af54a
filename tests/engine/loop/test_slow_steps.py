"""Warnings about slow steps."""

import logging

import pytest

from components.wire.step_stats import StepStats
from engine.loop.log_line import Held, SlowSteps, likely_cause


class World:
    """A clock, and the causes of delays."""

    def __init__(self) -> None:
        self.now = 10.0
        self.held = Held()
        self.slow = SlowSteps(lambda: self.held, lambda: self.now)

    def steps(self, step_s: float, number: int = 1, *, decode_tokens: int = 1, prompt_tokens: int = 0) -> None:
        for _ in range(number):
            self.now += step_s
            self.slow.stepped(StepStats(step_s=step_s, decode_tokens=decode_tokens, prompt_tokens=prompt_tokens))


def warnings(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [record.__dict__ for record in caplog.records if record.levelno == logging.WARNING]


def test_a_step_that_waited_for_cores_is_logged_with_that_cause(caplog: pytest.LogCaptureFixture) -> None:
    """Steps took 150 times as long as usual beside a busy process, and no log line reported it."""
    world = World()
    world.steps(0.012, 100)
    world.held = Held(cores_s=1.4)
    world.steps(1.5)
    [line] = warnings(caplog)
    assert (line["step_ms"], line["usual_ms"]) == (1500, 12)
    assert line["likely_cause"] == "other processes use these cores"
    assert line["cores_waited_for_ms"] == 1400


def test_slow_steps_are_logged_at_most_twice_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.steps(0.02, 400)
    for _ in range(40):  # 60 seconds
        world.steps(1.1)
        world.steps(0.02, 20)
    assert len(warnings(caplog)) == 2


def test_a_wait_before_the_step_is_not_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.held = Held(cores_s=60)
    world.steps(0.02, 100)
    world.steps(2)
    [line] = warnings(caplog)
    assert str(line["likely_cause"]).startswith("unknown")


def test_prompts_and_larger_batches_are_not_compared_with_small_steps(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.steps(0.02, 100)
    world.steps(0.8, prompt_tokens=512)
    world.steps(0.3, decode_tokens=32)
    assert not warnings(caplog)
    world.steps(0.15, 30, prompt_tokens=512)
    world.steps(0.9, prompt_tokens=512)
    [line] = warnings(caplog)
    assert line["kind"] == "prompt"


def test_steps_that_stay_slow_become_usual(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.steps(0.02, 100)
    world.steps(0.2, 1000)  # of 200 seconds
    assert 1 <= len(warnings(caplog)) <= 2


def test_short_first_and_empty_steps_are_not_slow(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.steps(3)  # the first one takes long: it touches new memory
    world.steps(0.001, 100, decode_tokens=4)
    world.steps(0.05, decode_tokens=4)
    world.steps(5, decode_tokens=0)
    assert not warnings(caplog)


@pytest.mark.parametrize(
    ("held", "cause"),
    [
        (Held(cores_s=0.5), "other processes use these cores"),
        (Held(cores_s=0.5, quota_s=0.4), "the cgroup's CPU quota is used up"),
        (Held(faults=5000), "memory is read back from disk"),
        (
            Held(cores_s=0.1, quota_s=0.1, faults=3),
            "unknown: the process waited neither for cores, for its CPU quota nor for the disk",
        ),
    ],
)
def test_the_cause_is_what_held_the_step_back(held: Held, cause: str) -> None:
    assert likely_cause(held, step_s=1.0) == cause
