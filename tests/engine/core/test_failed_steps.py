"""Failed steps that mean that the engine is dead."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from engine.core.engine_core import EngineCore
from engine.core.outcomes import MAX_FAILED_STEPS, EngineBroken
from engine.ports import Engine, EngineRequest
from engine.runner.step_runner import Launched, StepFailed
from engine.scheduler.request import Chunk
from engine.start import run_engine
from tests.engine.mock_engine import make_mock
from tests.engine.tiny_engine import greedy, prompt
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("pipeline")

Breaks = Callable[[Sequence[Chunk]], bool]


def every_step(_: Sequence[Chunk]) -> bool:
    return True


def with_poison(chunks: Sequence[Chunk]) -> bool:
    return any(chunk.request.tokens[0] == 99 for chunk in chunks)


def breaking(core: EngineCore, breaks: Breaks) -> EngineCore:
    """Make steps fail at their launch."""
    launch = core._runner.launch

    def launched(chunks: Sequence[Chunk]) -> Launched:
        if breaks(chunks):
            raise StepFailed("out of memory")
        return launch(chunks)

    core._runner.launch = launched  # type: ignore[method-assign]
    return core


def ask(core: Engine, name: str, tokens: list[int], failed: list[str]) -> None:
    """Submit a request, and step until the engine is idle."""
    core.submit(EngineRequest(name, tokens, greedy(2)))
    while core.has_work():
        failed += [one.request_id for one in core.step().failed]


def test_an_engine_whose_steps_all_fail_is_dead_after_a_few(tmp_path: Path) -> None:
    """It failed every request, and as the least loaded instance it got most of them."""
    failed: list[str] = []
    core = breaking(make_mock(tmp_path), every_step)
    for number in range(MAX_FAILED_STEPS - 1):
        ask(core, f"r{number}", prompt(20, start=number), failed)
    assert failed == [f"r{number}" for number in range(MAX_FAILED_STEPS - 1)]
    with pytest.raises(
        EngineBroken, match=f"{MAX_FAILED_STEPS} steps in a row failed, the last one with: out of memory"
    ):
        ask(core, "last", prompt(20, start=MAX_FAILED_STEPS), failed)


def test_a_request_that_fails_each_of_its_steps_does_not_end_the_engine(tmp_path: Path) -> None:
    failed: list[str] = []
    core = breaking(make_mock(tmp_path), with_poison)
    poison = [99, *prompt(20)]
    for number in range(3 * MAX_FAILED_STEPS):
        ask(core, f"r{number}", poison, failed)
    assert len(failed) == 3 * MAX_FAILED_STEPS


def test_a_step_that_lands_begins_the_count_anew(tmp_path: Path) -> None:
    failed: list[str] = []
    core = breaking(make_mock(tmp_path), with_poison)
    for number in range(3 * MAX_FAILED_STEPS):
        ask(core, f"bad{number}", [99, *prompt(20, start=number)], failed)
        if number % (MAX_FAILED_STEPS - 1) == MAX_FAILED_STEPS - 2:
            ask(core, f"good{number}", prompt(20), failed)
    assert failed == [f"bad{number}" for number in range(3 * MAX_FAILED_STEPS)]


@pytest.mark.anyio
@pytest.mark.parametrize("thread", [False, True])
async def test_the_loop_of_a_dead_engine_says_so(tmp_path: Path, *, thread: bool) -> None:
    async with run_engine(lambda: breaking(make_mock(tmp_path), every_step), thread=thread) as loop:
        failed: list[str] = []
        loop.on_output(lambda output: failed.extend(one.request_id for one in output.failed))
        for number in range(MAX_FAILED_STEPS):
            request = EngineRequest(f"r{number}", prompt(20, start=number), greedy(2))
            await until(lambda number=number: len(failed) == number)  # type: ignore[misc]
            await loop.between_steps(lambda engine, request=request: engine.submit(request))  # type: ignore[misc]
        assert isinstance(await loop.failed(), EngineBroken)
