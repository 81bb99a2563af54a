"""A step that fails takes its own requests with it, and nothing else."""

from collections.abc import Sequence

import pytest
from tiny_engine import Seen, check_pages, greedy, prompt, run_until_idle, small

from components.errors import InvariantBroken
from components.kv_transfer.layout import KvLayout
from engine.core import EngineCore, StepFailed
from engine.ports import EngineRequest, KvRegion, Phase
from engine.scheduler.scheduler import Chunk


class ScriptedRunner:
    """Samples 7 for ever; fails when told to."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.copied: list[tuple[int, int]] = []

    def run(self, chunks: Sequence[Chunk]) -> list[int | None]:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return [7 if chunk.samples else None for chunk in chunks]

    def copy_page(self, source: int, target: int) -> None:
        self.copied.append((source, target))


@pytest.fixture
def runner() -> ScriptedRunner:
    return ScriptedRunner()


@pytest.fixture
def core(runner: ScriptedRunner) -> EngineCore:
    layout = KvLayout(model="m", dtype="float32", page_size=16, layers=1, kv_heads=1, head_dim=8)
    return EngineCore(
        runner=runner,
        config=small(),
        region=KvRegion(0, 64, layout, "cpu"),
        max_context=512,
        vocab_size=128,
        eos_token_ids=frozenset(),
    )


def test_a_failed_step_fails_its_requests_and_no_others(core: EngineCore, runner: ScriptedRunner) -> None:
    core.submit(EngineRequest("full", prompt(20), greedy(5)))
    core.submit(EngineRequest("prefill", prompt(20, start=1), greedy(5), Phase.PREFILL))
    core.submit(EngineRequest("decode", prompt(20, start=2), greedy(5), Phase.DECODE))
    core.submit(EngineRequest("begun", prompt(40, start=3), greedy(5)))
    core.submit(EngineRequest("waits", prompt(10, start=4), greedy(5)))
    runner.error = StepFailed("out of memory")
    seen = Seen()
    seen.take(core.step())
    check_pages(core)
    assert set(seen.failed) == {"full", "prefill", "begun"}
    assert all(type(failed.error) is InvariantBroken for failed in seen.failed.values())
    assert seen.reserved.keys() == {"decode"}
    assert seen.steps[-1].num_held == 1, "the prefill's pages may be being read"
    core.release("prefill")
    core.cancel("decode")
    core.release("decode")
    assert run_until_idle(core, seen).tokens["waits"] == [7] * 5
    assert core.step().stats.held_pages == 0


def test_what_a_failed_step_should_have_computed_is_not_found(core: EngineCore, runner: ScriptedRunner) -> None:
    core.submit(EngineRequest("r", prompt(100), greedy(5), Phase.PREFILL))
    core.step()
    runner.error = StepFailed("out of memory")
    core.step()
    core.release("r")
    assert core.peek_prefix(prompt(100)) == 48


def test_the_id_of_a_failed_request_may_be_used_again(core: EngineCore, runner: ScriptedRunner) -> None:
    core.submit(EngineRequest("r", prompt(20), greedy(3)))
    runner.error = StepFailed("out of memory")
    core.step()
    core.submit(EngineRequest("r", prompt(20), greedy(3)))
    assert run_until_idle(core).tokens["r"] == [7, 7, 7]


def test_a_failed_branch_takes_its_request_with_it_and_is_told_once(core: EngineCore, runner: ScriptedRunner) -> None:
    core.submit(EngineRequest("r", prompt(20), greedy(9, n=3)))
    core.step()
    core.step()
    check_pages(core)
    assert len(runner.copied) == 2
    runner.error = StepFailed("out of memory")
    assert [failed.request_id for failed in core.step().failed] == ["r"]
    check_pages(core)
    assert not core.has_work()
    assert core.step().stats.held_pages == 0


def test_an_error_of_unknown_kind_is_not_swallowed(core: EngineCore, runner: ScriptedRunner) -> None:
    core.submit(EngineRequest("r", prompt(20), greedy(3)))
    runner.error = OSError("the device is gone")
    with pytest.raises(OSError, match="gone"):
        core.step()
