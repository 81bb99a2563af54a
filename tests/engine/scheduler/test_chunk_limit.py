"""A prompt beside decodes is computed in chunks that take a fraction of a second, however slow the machine is."""

import pytest

from engine.model.load import LoadedModel
from engine.ports import EngineRequest
from engine.scheduler.scheduler import BESIDE_S, FEWEST, UNKNOWN, ChunkLimit
from tests.engine.tiny_engine import greedy, make_engine, prompt


def test_before_anything_is_known_a_chunk_is_short() -> None:
    limit = ChunkLimit()
    assert limit.tokens == UNKNOWN
    limit.stepped(0, 4, 0.03)
    assert limit.tokens == UNKNOWN


@pytest.mark.parametrize("speed", [400.0, 2000.0, 4000.0])
def test_a_chunk_takes_as_long_as_it_may(speed: float) -> None:
    """The decodes of the same steps are not taken for slowness of prompts, or chunks would shrink for good."""
    limit, decode_s = ChunkLimit(), 0.1
    limit.stepped(0, 8, decode_s)
    for _ in range(50):
        tokens = min(limit.tokens, 512)
        limit.stepped(tokens, 8, decode_s + tokens / speed)
    assert limit.tokens == pytest.approx(BESIDE_S * speed, rel=0.3)


def test_a_chunk_is_never_so_short_that_steps_cost_more_than_it() -> None:
    limit = ChunkLimit()
    for _ in range(50):
        limit.stepped(limit.tokens, 8, 5.0)
    assert limit.tokens == FEWEST


def test_it_follows_a_machine_that_gets_busy_and_is_left_alone_again() -> None:
    limit = ChunkLimit()
    for speed in (3000.0, 400.0, 3000.0):
        for _ in range(20):
            limit.stepped(256, 1, 256 / speed)
        assert limit.tokens == pytest.approx(BESIDE_S * speed, rel=0.1)


def test_a_long_prompt_is_cut_beside_decodes_and_not_when_it_is_alone(tiny: LoadedModel) -> None:
    engine = make_engine(tiny, max_step_tokens=512)
    engine.submit(EngineRequest("alone", prompt(UNKNOWN + 72), greedy(1)))
    assert engine.step().stats.prompt_tokens == UNKNOWN + 72
    engine = make_engine(tiny, max_step_tokens=512)
    engine.submit(EngineRequest("talks", prompt(5), greedy(20, ignore_eos=True)))
    engine.step()
    engine.submit(EngineRequest("reads", prompt(UNKNOWN + 72, start=1), greedy(1)))
    assert engine.step().stats.prompt_tokens == UNKNOWN
