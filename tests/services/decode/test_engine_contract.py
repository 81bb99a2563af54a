"""The engine's behaviour when a transfer fails, without a device."""

from collections.abc import Sequence

import pytest

from components.wire.layout import KvRegion
from components.wire.sampling import SamplingParams
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.ports import EngineRequest, Phase, StepOutput
from engine.scheduler.request import Chunk
from tests.components.kv_transfer.fake_transfer import LAYOUT


class Sevens:
    """Draws only token 7."""

    takes_cpu = True
    forward_kind = ""

    def launch(self, chunks: Sequence[Chunk]) -> "Sevens":
        self.chunks = chunks
        self.token_ids = [(7,) if chunk.samples else () for chunk in chunks]
        return self

    def sample(self) -> None:
        pass

    def result(self) -> Sequence[Sequence[int]]:
        return self.token_ids

    def copy_pages(self, moves: Sequence[tuple[int, int]]) -> None:
        raise AssertionError("no request here has branches")


@pytest.fixture
def engine() -> EngineCore:
    """Room for one prompt of 40 tokens, not for two."""
    return EngineCore(
        runner=Sevens(),
        config=EngineConfig(page_size=16, max_running=4, max_step_tokens=64, reserve_tokens=4),
        region=KvRegion(0, 5, LAYOUT, "cpu"),
        max_context=64,
        vocab_size=100,
        eos_token_ids=frozenset(),
    )


def ask(engine: EngineCore, name: str) -> None:
    tokens = [ord(name) % 50] * 40
    engine.submit(EngineRequest(name, tokens, SamplingParams(max_tokens=2, temperature=0), Phase.DECODE))


def run(engine: EngineCore) -> list[StepOutput]:
    outputs = []
    while engine.has_work():
        outputs.append(engine.step())
        assert len(outputs) < 50
    return outputs


def test_a_transfer_that_fails_before_there_were_pages_is_computed_all_the_same(engine: EngineCore) -> None:
    """`recompute` ignored a request that was still queued: it got its pages later, and held them forever."""
    ask(engine, "a")
    ask(engine, "b")
    assert [r.request_id for output in run(engine) for r in output.reserved] == ["a"]
    engine.recompute("b")
    engine.release("b")
    engine.cancel("a")
    engine.release("a")
    outputs = run(engine)
    assert not any(output.reserved for output in outputs)
    assert [t for output in outputs for o in output.tokens if o.request_id == "b" for t in o.token_ids] == [7, 7]
    stats = engine.step().stats
    assert (stats.held_pages, stats.num_held, stats.num_reserved) == (0, 0, 0)
    assert stats.free_pages + stats.cached_pages == stats.total_pages
