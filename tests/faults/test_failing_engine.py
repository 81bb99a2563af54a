"""Workers whose device fails every step."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.core.outcomes import EngineBroken
from engine.runner.step_runner import StepFailed
from engine.scheduler.request import Chunk
from tests.faults import nodes
from tests.faults.limits import ANYTHING
from tests.faults.mesh_run import Outcome, run_faults


def with_failing(monkeypatch: pytest.MonkeyPatch, home: Path, name: str) -> Outcome:
    """100 requests in 4 s to four decode and four prefill instances, one of which computes nothing."""
    start_engine = nodes.Worker._start_engine

    async def start(self: nodes.Worker, stack: Any) -> None:
        await start_engine(self, stack)
        if self.id == name:
            monkeypatch.setattr(self.engine.core._runner, "launch", fail)

    def fail(_: Sequence[Chunk]) -> None:
        raise StepFailed("out of memory")

    monkeypatch.setattr(nodes.Worker, "_start_engine", start)
    counts = {"frontend": 1, "decode": 4, "prefill": 4, "bootstrap": 1}
    return run_faults(home, 3, [], num_clients=100, over_s=4.0, counts=counts, limit=ANYTHING)


def test_a_decode_whose_steps_fail_ends_and_its_requests_are_answered_elsewhere(
    monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    """It stayed the least loaded instance: 22 of 100 requests got a 500."""
    outcome = with_failing(monkeypatch, home, "decode2")
    assert not outcome.problems
    assert Counter(type(client.error) for client in outcome.clients) == {type(None): 100}
    assert {name: type(error) for name, error in outcome.died.items()} == {"decode2": EngineBroken}


def test_a_prefill_whose_steps_fail_ends_and_is_asked_for_few_prompts(
    monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    """22 of 100 prompts went there, failed, and were computed by decode."""
    outcome = with_failing(monkeypatch, home, "prefill2")
    assert not outcome.problems
    assert Counter(type(client.error) for client in outcome.clients) == {type(None): 100}
    assert outcome.counts["recomputes"] <= 12
    assert {name: type(error) for name, error in outcome.died.items()} == {"prefill2": EngineBroken}
