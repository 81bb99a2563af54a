"""In bfloat16 on a CPU a request's logits have the same bits in any batch, and wherever its prompt is cut."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from components.wire.sampling import SamplingParams
from engine.attention.backend import StepAttention
from engine.build import assemble
from engine.compilation.forward import EagerForward
from engine.kernels.linear import is_packed, pack_linears
from engine.model.load import LoadedModel
from engine.ports import EngineRequest, Phase
from tests.engine.tiny_engine import alone, greedy, load_tiny, make_engine, prompt, run, run_until_idle, small

STEPS = 4  # tokens that are drawn


@dataclass(frozen=True)
class Company:
    """The other requests, and earlier ones."""

    config: dict[str, Any] = field(default_factory=dict)
    others: int = 0  # requests that decode
    cached: bool = False


COMPANIES = {
    "again": Company(),
    "one chunk but for a token": Company({"max_step_tokens": 96, "max_running": 1}),
    "chunks of 37": Company({"max_step_tokens": 37, "max_running": 1}),
    "chunks of 3": Company({"max_step_tokens": 3, "max_running": 1}),
    "beside 20 decodes": Company(others=20),
    "in small chunks beside 20 decodes": Company({"max_step_tokens": 66}, others=20),
    "behind a prefix hit": Company(cached=True),
    "behind a prefix hit beside a decode": Company(others=1, cached=True),
}


@pytest.fixture(scope="module")
def loaded(tiny_dir: Path, kernel: str | None) -> LoadedModel:
    model = load_tiny(tiny_dir, dtype="bfloat16")
    pack_linears(model.module)
    assert kernel is not None or is_packed(model.module)
    return model


class Noting:
    """The eager forward, which records the requested logits."""

    kind = EagerForward.kind

    def __init__(self, loaded: LoadedModel) -> None:
        self.seen: dict[tuple[int, int], torch.Tensor] = {}  # by position and token
        self._eager = EagerForward(loaded.module)

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, step: StepAttention
    ) -> torch.Tensor:
        logits = self._eager(ids, positions, keep, step)
        for position, token, row in zip(positions[keep].tolist(), ids[keep].tolist(), logits, strict=True):
            self.seen[position, token] = row.clone()
        return logits


def logits_of(loaded: LoadedModel, tokens: Sequence[int], company: Company) -> list[torch.Tensor]:
    """Return the logits of each token of a greedy request."""
    forward = Noting(loaded)
    seen = forward.seen
    config = {"dtype": "bfloat16", "max_step_tokens": 512, "num_pages": 400, "max_running": 64, **company.config}
    core = assemble(loaded, small(**config), forward)
    if company.cached:
        run(core, [EngineRequest("before", [*tokens, 9], greedy(1))])
    for i in range(company.others):
        core.submit(EngineRequest(f"o{i}", prompt(5 + i, start=i + 1), greedy(60, ignore_eos=True)))  # short of r
    for _ in range(3 if company.others else 0):
        core.step()
    seen.clear()
    core.submit(EngineRequest("r", tokens, greedy(STEPS, ignore_eos=True)))
    drawn = run_until_idle(core).tokens["r"]
    text = [*tokens, *drawn]
    return [seen[at, text[at]] for at in range(len(tokens) - 1, len(text) - 1)]


@pytest.mark.parametrize("length", [97, 100])
@pytest.mark.parametrize("company", COMPANIES.values(), ids=COMPANIES)
def test_logits_have_the_same_bits_in_any_company(loaded: LoadedModel, company: Company, length: int) -> None:
    """A last chunk of one token, after a budget or a prefix hit, had logits that were off by 0.05."""
    expected = logits_of(loaded, prompt(length), Company())
    found = logits_of(loaded, prompt(length), company)
    assert [torch.equal(one, other) for one, other in zip(found, expected, strict=True)] == [True] * STEPS


def test_a_branch_is_the_request_with_its_seed_to_the_last_bit(loaded: LoadedModel) -> None:
    """Branches computed the last token of their prompt alone."""
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=5, n=3)
    for length in (2, 17, 33, 97):
        engine = make_engine(loaded, dtype="bfloat16", max_step_tokens=512)
        engine.submit(EngineRequest("r", prompt(length), params))
        told = []
        while engine.has_work():
            told += [output.logprobs for output in engine.step().tokens]
        assert len(told) == 3
        assert told[0] == told[1] == told[2]


def test_prefill_and_a_worker_that_computes_the_prompt_itself_draw_from_the_same_bits(loaded: LoadedModel) -> None:
    config = {"dtype": "bfloat16", "max_step_tokens": 512}
    request = EngineRequest("r", prompt(49), SamplingParams(max_tokens=2, logprobs=5), Phase.PREFILL)
    computed = run(make_engine(loaded, **config, max_running=1), [request]).computed["r"][-1]
    in_chunks = run(make_engine(loaded, **config | {"max_step_tokens": 24}), [request]).computed["r"][-1]
    assert computed.logprobs == in_chunks.logprobs
    assert [computed.first_token] == alone(loaded, prompt(49), SamplingParams(max_tokens=2), **config)[:1]
