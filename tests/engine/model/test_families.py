"""Every family, compared with transformers: logits of prompts in chunks, ids of batches, over all page sizes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor
from transformers import PreTrainedModel

from engine.attention.backend import Scoring, StepAttention, StepShape
from engine.attention.choose_attention import make_attention
from engine.attention.step_tables import StepLimits
from engine.build import assemble
from engine.compilation.forward import EagerForward
from engine.config import AttentionKind
from engine.kv.storage import allocate_storage
from engine.model.load import LoadedModel
from engine.ports import EngineRequest
from tests.engine.model.families import FAMILIES, WINDOWED, reference, reference_greedy, reference_logits, save_model
from tests.engine.tiny_engine import greedy, load_tiny, make_engine, prompt, run, small

# the longest is six windows, and three chunks of 48
PROMPTS = {f"r{length}": prompt(length, start=length) for length in (5, 20, 43, 131)}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def directory(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("families") / family, FAMILIES[family]())


@pytest.fixture(scope="module")
def loaded(directory: Path) -> Callable[[str], LoadedModel]:
    """The model by dtype, loaded once for each. Engines only read it."""
    return cache(lambda dtype: load_tiny(directory, dtype=dtype))


def sized(loaded: LoadedModel, page_size: int) -> LoadedModel:
    return replace(loaded, layout=structs.replace(loaded.layout, page_size=page_size))


@pytest.fixture(scope="module")
def model(directory: Path) -> PreTrainedModel:
    return reference(directory)


@pytest.fixture(scope="module")
def truth(model: PreTrainedModel) -> Tensor:
    return reference_logits(model, prompt(131))


@pytest.fixture(scope="module")
def rounding(directory: Path, truth: Tensor) -> Callable[[str], Tensor]:
    """Return the error of transformers' logits, by dtype."""
    return cache(lambda dtype: reference_logits(reference(directory, getattr(torch, dtype)), prompt(131)) - truth)


@pytest.fixture(scope="module")
def wanted(model: PreTrainedModel) -> dict[str, list[int]]:
    return answers(model, 24)


def answers(model: PreTrainedModel, max_tokens: int) -> dict[str, list[int]]:
    return {name: reference_greedy(model, ids, max_tokens) for name, ids in PROMPTS.items()}


@torch.inference_mode()
def paged_logits(loaded: LoadedModel, token_ids: Sequence[int], chunk: int, backend: AttentionKind) -> Tensor:
    """Return float32 [T, vocab], computed `chunk` tokens at a time over pages in any order."""
    num_pages = loaded.layout.pages_for(len(token_ids))
    storage = allocate_storage(loaded.layout, num_pages, loaded.device)
    attention = make_attention(backend, storage, loaded.layout, loaded.query_group, StepLimits(1, 131, 131))
    table = torch.randperm(num_pages).tolist()
    forward = EagerForward(loaded.module)
    logits = []
    for start in range(0, len(token_ids), chunk):
        ids = torch.tensor(token_ids[start : start + chunk], device=loaded.device)
        positions = start + torch.arange(len(ids), device=loaded.device)
        step = attention.plan(StepShape([len(ids)], [start + len(ids)], [table]))
        keep = torch.arange(len(ids), device=loaded.device)
        logits.append(forward(ids, positions, keep, step).float().cpu())
    return torch.cat(logits)


@pytest.mark.parametrize(
    ("page_size", "chunk", "backend"),
    [(16, 7, "torch"), (16, 1, "auto"), (32, 50, "auto"), (64, 17, "torch"), (128, 50, "torch"), (128, 131, "auto")],
)
def test_logits_of_a_prompt_in_chunks_are_those_of_transformers(
    loaded: Callable[[str], LoadedModel], truth: Tensor, page_size: int, chunk: int, backend: AttentionKind
) -> None:
    logits = paged_logits(sized(loaded("float32"), page_size), prompt(131), chunk, backend)
    torch.testing.assert_close(logits, truth, atol=2e-4 * float(truth.abs().max()), rtol=0)


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_near_to_the_truth_as_that_of_transformers(
    loaded: Callable[[str], LoadedModel],
    rounding: Callable[[str], Tensor],
    truth: Tensor,
    dtype: str,
    backend: AttentionKind,
) -> None:
    """The median: rounding sends some tokens to other experts."""
    theirs = rounding(dtype)
    ours = paged_logits(loaded(dtype), prompt(131), 50, backend) - truth
    assert 0 < ours.abs().median() < 1.3 * theirs.abs().median()


@pytest.mark.parametrize(("page_size", "backend"), [(16, "torch"), (32, "auto"), (64, "torch"), (128, "auto")])
def test_prompts_in_chunks_and_batched_decode_give_the_ids_of_generate(
    loaded: Callable[[str], LoadedModel], wanted: dict[str, list[int]], page_size: int, backend: AttentionKind
) -> None:
    sizes = {"page_size": page_size, "num_pages": 1024 // page_size}
    engine = make_engine(sized(loaded("float32"), page_size), **sizes, attention=backend)
    seen = run(engine, [EngineRequest(name, ids, greedy(24)) for name, ids in PROMPTS.items()])
    assert max(stats.num_running for stats in seen.steps) == len(PROMPTS)
    assert seen.tokens == wanted


def test_a_request_gives_the_same_ids_alone_and_among_others(loaded: Callable[[str], LoadedModel]) -> None:
    model = loaded("float32")
    requests = [EngineRequest(f"r{i}", prompt(9 + 11 * i, start=i), greedy(16)) for i in range(12)]
    together = run(make_engine(model), requests).tokens
    for request in requests[::4]:
        assert run(make_engine(model, max_step_tokens=29), [request]).tokens == {
            request.request_id: together[request.request_id]
        }


class Otherwise:
    """The eager forward with another scoring."""

    kind = EagerForward.kind

    def __init__(self, loaded: LoadedModel, **changes: Any) -> None:
        self._forward = EagerForward(loaded.module)
        self._changes = changes

    def __call__(self, ids: Tensor, positions: Tensor, keep: Tensor, step: StepAttention) -> Tensor:
        changes = self._changes

        class Step:
            def attend(
                self,
                layer: int,
                query: Tensor,
                key: Tensor,
                value: Tensor,
                scoring: Scoring,
                *,
                sinks: Tensor | None = None,
            ) -> Tensor:
                told = {name: change for name, change in changes.items() if getattr(scoring, name, None)}
                return step.attend(
                    layer, query, key, value, replace(scoring, **told), sinks=changes.get("sinks", sinks)
                )

        return self._forward(ids, positions, keep, Step())


@pytest.mark.parametrize(
    ("name", "changes"),
    [*((name, {"window": 0}) for name in WINDOWED), ("gemma2", {"softcap": 0.0}), ("gpt-oss", {"sinks": None})],
    ids=[*WINDOWED, "gemma2-softcap", "gpt-oss-sinks"],
)
def test_without_its_window_cap_or_sinks_a_model_gives_other_ids(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    """So the tests above can fail."""
    loaded = load_tiny(save_model(tmp_path, FAMILIES[name]()))
    requests = [EngineRequest(name, ids, greedy(24)) for name, ids in PROMPTS.items()]
    right = run(make_engine(loaded), requests).tokens
    wrong = run(assemble(loaded, small(), Otherwise(loaded, **changes)), requests).tokens
    assert len(set(right["r131"])) > 5, "it repeats itself: whatever it is told, it would"
    assert wrong["r131"] != right["r131"]


@pytest.fixture(
    scope="module",
    params=product(["gemma2", "gemma3", "mistral-window"], [("multi-head", 4), ("multi-query", 1)]),
    ids=lambda param: f"{param[0]}-{param[1][0]}",
)
def with_heads(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LoadedModel, dict[str, list[int]]]:
    """Return a model with these heads, and transformers' answers."""
    name, (_, kv_heads) = request.param
    config = FAMILIES[name]()
    config.num_key_value_heads = kv_heads
    directory = save_model(tmp_path_factory.mktemp("heads") / name, config)
    return load_tiny(directory), answers(reference(directory), 16)


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_windows_and_caps_are_right_for_every_kind_of_heads(
    with_heads: tuple[LoadedModel, dict[str, list[int]]], backend: AttentionKind
) -> None:
    loaded, wanted = with_heads
    seen = run(
        make_engine(loaded, attention=backend),
        [EngineRequest(name, ids, greedy(16)) for name, ids in PROMPTS.items()],
    )
    assert seen.tokens == wanted
