"""A failed step fails only its own requests."""

from collections.abc import Sequence

import pytest

from components.errors import InvariantBroken
from components.wire.layout import KvLayout, KvRegion
from engine.core.engine_core import EngineCore
from engine.ports import EngineRequest, Phase
from engine.runner.step_runner import StepFailed
from engine.scheduler.request import Chunk
from tests.engine.tiny_engine import Seen, check_pages, greedy, peek, prompt, run_until_idle, small

pytestmark = pytest.mark.usefixtures("pipeline")


class ScriptedStep:
    def __init__(self, chunks: Sequence[Chunk], errors: dict[str, Exception]) -> None:
        self.chunks = chunks
        self.errors = errors

    def sample(self) -> None:
        if error := self.errors.pop("sample", None):
            raise error

    def result(self) -> Sequence[Sequence[int]]:
        if error := self.errors.pop("result", None):
            raise error
        return [(7,) if chunk.samples else () for chunk in self.chunks]


class ScriptedRunner:
    """Samples 7 in every step. `errors` makes the next step fail: at its launch, its draws or its end."""

    takes_cpu = True
    forward_kind = ""

    def __init__(self) -> None:
        self.errors: dict[str, Exception] = {}
        self.copied: list[tuple[int, int]] = []

    def launch(self, chunks: Sequence[Chunk]) -> ScriptedStep:
        errors, self.errors = self.errors, {}
        if error := errors.pop("launch", None):
            raise error
        return ScriptedStep(chunks, errors)

    def copy_pages(self, moves: Sequence[tuple[int, int]]) -> None:
        self.copied += moves


@pytest.fixture
def runner() -> ScriptedRunner:
    return ScriptedRunner()


@pytest.fixture(params=["launch", "sample", "result"])
def where(request: pytest.FixtureRequest) -> str:
    return request.param


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


def until_failed(core: EngineCore) -> Seen:
    seen = Seen()
    while not seen.failed:
        seen.take(core.step())
        check_pages(core)
    return seen


def test_a_failed_step_fails_its_requests_and_no_others(core: EngineCore, runner: ScriptedRunner, where: str) -> None:
    core.submit(EngineRequest("full", prompt(20), greedy(5)))
    core.submit(EngineRequest("prefill", prompt(20, start=1), greedy(5), Phase.PREFILL))
    core.submit(EngineRequest("decode", prompt(20, start=2), greedy(5), Phase.DECODE))
    core.submit(EngineRequest("begun", prompt(40, start=3), greedy(5)))
    core.submit(EngineRequest("waits", prompt(10, start=4), greedy(5)))
    runner.errors[where] = StepFailed("out of memory")
    seen = until_failed(core)
    assert set(seen.failed) == {"full", "prefill", "begun"}
    assert all(type(failed.error) is InvariantBroken for failed in seen.failed.values())
    assert seen.reserved.keys() == {"decode"}
    seen.take(core.step())
    assert seen.steps[-1].num_held == 1, "the prefill's pages may be being read"
    core.release("prefill")
    core.cancel("decode")
    core.release("decode")
    assert run_until_idle(core, seen).tokens["waits"] == [7] * 5
    assert core.step().stats.held_pages == 0


def test_what_a_failed_step_should_have_computed_is_not_found(
    core: EngineCore, runner: ScriptedRunner, where: str
) -> None:
    core.submit(EngineRequest("r", prompt(100), greedy(5), Phase.PREFILL))
    core.step()
    runner.errors[where] = StepFailed("out of memory")
    assert [computed.num_computed for computed in until_failed(core).computed.get("r", ())] in ([], [48])
    core.release("r")
    assert peek(core, prompt(100)) == 48


def test_the_id_of_a_failed_request_may_be_used_again(core: EngineCore, runner: ScriptedRunner, where: str) -> None:
    core.submit(EngineRequest("r", prompt(20), greedy(3)))
    runner.errors[where] = StepFailed("out of memory")
    until_failed(core)
    core.submit(EngineRequest("r", prompt(20), greedy(3)))
    assert run_until_idle(core).tokens["r"] == [7, 7, 7]


def test_a_failed_branch_takes_its_request_with_it_and_is_told_once(
    core: EngineCore, runner: ScriptedRunner, where: str
) -> None:
    core.submit(EngineRequest("r", prompt(20), greedy(9, n=3)))
    while len(runner.copied) < 2:
        core.step()
    check_pages(core)
    runner.errors[where] = StepFailed("out of memory")
    assert list(until_failed(core).failed) == ["r"]
    run_until_idle(core)
    assert core.step().stats.held_pages == 0


def test_an_error_of_unknown_kind_is_not_swallowed(core: EngineCore, runner: ScriptedRunner, where: str) -> None:
    core.submit(EngineRequest("r", prompt(20), greedy(3)))
    runner.errors[where] = OSError("the device is gone")
    with pytest.raises(OSError, match="gone"):
        run_until_idle(core)
