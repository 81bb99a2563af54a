import logging
from pathlib import Path

import pytest

from components.wire.step_stats import StepStats
from engine.loop.log_line import BatchLog
from engine.model.load import LoadedModel
from engine.ports import EngineRequest, StepOutput
from tests.engine.mock_engine import make_mock
from tests.engine.tiny_engine import greedy, make_engine, prompt


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def step(decode_tokens: int = 4, prompt_tokens: int = 0) -> StepOutput:
    counts = {"decode_tokens": decode_tokens, "prompt_tokens": prompt_tokens}
    return StepOutput(stats=StepStats(num_running=4, held_pages=10, total_pages=40, step_s=0.1, **counts))


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [record.__dict__ for record in caplog.records if record.msg == "batch"]


def test_one_line_a_second_with_rates_over_it(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    batches = BatchLog(16, clock)
    with caplog.at_level(logging.INFO):
        for _ in range(35):
            clock.now += 0.1
            batches.stepped(step(prompt_tokens=8))
    assert len(lines(caplog)) == 3
    for line in lines(caplog):
        assert line["gen throughput (token/s)"] == pytest.approx(40, rel=0.1)
        assert line["input throughput (token/s)"] == pytest.approx(80, rel=0.1)
        assert (line["#running-req"], line["#token"], line["token usage"]) == (4, 160, 0.25)


def test_an_idle_engine_says_nothing_and_its_idle_time_counts_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    batches = BatchLog(16, clock)
    with caplog.at_level(logging.INFO):
        for _ in range(20):  # requests wait for pages: steps without tokens
            clock.now += 0.25
            batches.stepped(step(decode_tokens=0))
        assert not lines(caplog)
        clock.now += 60
        for _ in range(11):
            batches.stepped(step())
            clock.now += 0.1
        [line] = lines(caplog)
        assert line["gen throughput (token/s)"] == pytest.approx(40, rel=0.1)


def test_every_fact_of_the_line_comes_from_an_engines_own_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    batches = BatchLog(16, clock)
    engine = make_mock(tmp_path)
    engine.submit(EngineRequest("r", prompt(20), greedy(9)))
    with caplog.at_level(logging.INFO):
        batches.stepped(engine.step())
        clock.now += 1
        batches.stepped(engine.step())
    [line] = lines(caplog)
    assert line["#running-req"] == 1
    assert line["#token"] == 32


def test_a_line_leaves_out_what_is_zero_and_has_what_the_service_adds(caplog: pytest.LogCaptureFixture) -> None:
    """It had 200 columns, half of them zeros."""
    clock = Clock()
    batches = BatchLog(16, clock, more=lambda: {"#transfer-req": 2, "pre-allocated usage": 0.25, "#other": 0})
    stats = StepStats(num_running=4, decode_tokens=4, held_pages=10, total_pages=40, step_s=0.1, forward="compiled")
    with caplog.at_level(logging.INFO):
        for _ in range(11):
            clock.now += 0.1
            batches.stepped(StepOutput(stats=stats))
    [line] = lines(caplog)
    assert {name for name in line if "#" in name or " " in name or name == "forward"} == {
        "#running-req",
        "#token",
        "token usage",
        "gen throughput (token/s)",
        "#transfer-req",
        "pre-allocated usage",
        "forward",
    }
    assert (line["#transfer-req"], line["pre-allocated usage"], line["forward"]) == (2, 0.25, "compiled")


def test_an_engine_with_a_model_tells_how_that_ran(tiny: LoadedModel) -> None:
    engine = make_engine(tiny)
    engine.submit(EngineRequest("r", prompt(20), greedy(2)))
    assert engine.step().stats.forward == "eager"
