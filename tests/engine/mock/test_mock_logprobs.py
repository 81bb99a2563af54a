"""The mock's log-probabilities are equal wherever a token is drawn, and exact in float32."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from components.wire.logprobs import pack_logprobs, unpack_logprobs
from components.wire.sampling import SamplingParams
from engine.ports import EngineRequest
from tests.engine.mock_engine import make_mock
from tests.engine.tiny_engine import prefilled, prompt, run

pytestmark = pytest.mark.usefixtures("pipeline")

TOLD = SamplingParams(max_tokens=12, temperature=1.0, seed=7, ignore_eos=True, logprobs=3)


def test_each_token_has_its_own_and_its_alternatives(tmp_path: Path) -> None:
    seen = run(
        make_mock(tmp_path),
        [EngineRequest("r", prompt(50), TOLD), EngineRequest("s", prompt(9), replace(TOLD, logprobs=None))],
    )
    told = seen.logprobs["r"]
    assert len(told) == len(seen.tokens["r"]) == 12
    assert [entry.top[0] for entry in told] == [(t, e.logprob) for t, e in zip(seen.tokens["r"], told, strict=True)]
    assert all(len({token_id for token_id, _ in entry.top}) == 3 for entry in told)
    assert len({entry.logprob for entry in told}) > 6
    assert seen.logprobs["s"] == []
    assert unpack_logprobs(pack_logprobs(told), 12) == told


def test_they_are_the_same_after_a_move_and_for_a_first_token_drawn_elsewhere(tmp_path: Path) -> None:
    whole = run(make_mock(tmp_path), [EngineRequest("r", prompt(50), TOLD)])
    computed = prefilled(make_mock(tmp_path), "r", prompt(50), TOLD)
    assert computed.logprobs == whole.logprobs["r"][0]
    moved = EngineRequest("r", [*prompt(50), *whole.tokens["r"][:5]], replace(TOLD, max_tokens=7), num_generated=5)
    assert run(make_mock(tmp_path), [moved]).logprobs["r"] == whole.logprobs["r"][5:]


@pytest.mark.parametrize("length", [1, 2, 16, 100])
def test_the_prompts_come_once_for_every_token_but_the_first(tmp_path: Path, length: int) -> None:
    engine = make_mock(tmp_path)
    asked = replace(TOLD, prompt_logprobs=2, n=2)
    for name in ("a", "b"):  # the second finds the prompt in the prefix cache, and looks at all of it all the same
        seen = run(engine, [EngineRequest(name, prompt(length), asked)])
        told = seen.prompt_logprobs[name]
        assert [entry.top[0][0] for entry in told] == prompt(length)[1:]
