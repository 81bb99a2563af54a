"""A prompt of any length pauses the running decodes by at most one chunk."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.ports import EngineRequest
from tests.engine.mock_engine import make_mock
from tests.engine.tiny_engine import greedy, prompt

pytestmark = pytest.mark.usefixtures("pipeline")

BUDGET = 24


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=12),
    gaps=st.lists(st.integers(0, 6), min_size=12, max_size=12),
    priorities=st.lists(st.integers(-2, 2), min_size=12, max_size=12),
)
def test_no_running_decode_waits_for_more_than_one_chunk(
    tmp_path: Path, lengths: list[int], gaps: list[int], priorities: list[int]
) -> None:
    """Each running request gets a token in every step, beside at most a chunk of prompts."""
    engine = make_mock(tmp_path, num_pages=400, max_running=12, max_step_tokens=BUDGET)
    running: set[str] = set()

    def step() -> None:
        output = engine.step()
        told = {tokens.request_id for tokens in output.tokens}
        assert running <= told, "a running decode was left out"
        assert output.stats.prompt_tokens + len(running) <= BUDGET
        running.update(told)
        running.difference_update(t.request_id for t in output.tokens if t.finish)

    for i, (length, gap, priority) in enumerate(zip(lengths, gaps, priorities, strict=False)):
        engine.submit(EngineRequest(f"r{i}", prompt(length, i), greedy(40, ignore_eos=True), priority=priority))
        for _ in range(gap):
            step()
    while engine.has_work():
        step()
