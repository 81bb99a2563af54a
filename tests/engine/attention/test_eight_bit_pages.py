"""Every backend over pages of 8-bit floats, compared with attention written out, and their rounding with torch's."""

from functools import partial
from typing import Any

import pytest
import torch

from bench.attention_case import LAYER, AttentionCase, Dtype, MakeBackend, Outcome
from engine.attention.backend import Scoring, StepShape
from engine.attention.plain import PlainAttention
from engine.attention.step_tables import StepLimits
from engine.attention.triton_backend import TritonAttention
from tests.engine.attention.makers import make_cpu, make_plain

EIGHT = torch.float8_e4m3fn
BACKENDS = [make_cpu, make_plain, partial(TritonAttention, span=64, programs=8)]
NAMES = ["cpu", "torch", "triton"]
DTYPES: list[Dtype] = ["float32", "bfloat16", "float16"]


@pytest.fixture(autouse=True)
def _needs_kernel(request: pytest.FixtureRequest, kernel: str | None) -> None:
    if kernel is not None and request.node.callspec.params.get("make") is make_cpu:
        pytest.skip(kernel)


def case(queries: tuple[int, ...], contexts: tuple[int, ...], dtype: Dtype = "bfloat16", **more: Any) -> AttentionCase:
    return AttentionCase(queries, contexts, dtype=dtype, eight_bits=True, **more)


@pytest.mark.parametrize("make", BACKENDS, ids=NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "scoring", [Scoring(0.3), Scoring(0.3, window=20), Scoring(0.3, 0, 2.0)], ids=["plain", "windowed", "capped"]
)
def test_each_request_attends_to_its_own_context(make: MakeBackend, dtype: Dtype, scoring: Scoring) -> None:
    Outcome(case((1, 1, 1, 20, 5), (4, 33, 300, 20, 70), dtype, scoring=scoring), make).check()


@pytest.mark.parametrize("make", BACKENDS, ids=NAMES)
@pytest.mark.parametrize(
    "changes",
    [{"page_size": 32, "head_dim": 80}, {"page_size": 128, "head_dim": 64, "group": 8}, {"sinks": True, "group": 7}],
    ids=str,
)
def test_page_sizes_head_sizes_and_sinks(make: MakeBackend, changes: dict[str, Any]) -> None:
    Outcome(case((1, 1, 20), (17, 100, 90), **changes), make).check()


@pytest.mark.parametrize("make", BACKENDS, ids=NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_byte_of_a_page_is_read_as_the_number_that_torch_reads(make: MakeBackend, dtype: Dtype) -> None:
    """A decode whose window is its own token and the one before: with equal scores the result is half of the sum."""
    numbers = torch.arange(256, dtype=torch.uint8).view(EIGHT)
    valid = numbers.float().isfinite()
    layout = case((1,), (2,), head_dim=256).layout
    pool = torch.zeros(1, 2, layout.layers, 2, 16, 256, dtype=EIGHT)
    pool.view(torch.uint8)[0, :, LAYER, 1, 0] = torch.where(valid, numbers.view(torch.uint8), 0)
    query, new = (torch.zeros(1, heads, 1, 256, dtype=getattr(torch, dtype)) for heads in (2, 2))
    backend = make(pool, layout, 1, StepLimits(1, 1, 2), dtype=query.dtype)
    out = backend.plan(StepShape([1], [2], [[0]])).attend(LAYER, query, new, new, Scoring(1.0))
    wanted = torch.where(valid, numbers.float(), 0) / 2
    assert torch.equal(out[0, 0, 0].float(), wanted)


@pytest.mark.parametrize("make", BACKENDS, ids=NAMES)
@pytest.mark.parametrize("decodes", [True, False], ids=["decodes", "a chunk"])
def test_each_bfloat16_number_is_rounded_as_torch_does_and_saturates(make: MakeBackend, decodes: bool) -> None:
    numbers = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    numbers = torch.where(numbers.isfinite(), numbers, 0).view(2, 1, 2, 64, 256)
    heads, tokens = numbers.shape[2:4]
    layout = case((1,), (1,), head_dim=256).layout
    pool = torch.zeros(tokens, heads, layout.layers, 2, 16, 256, dtype=EIGHT)
    key, value = numbers
    query = torch.zeros(1, heads, tokens, 256, dtype=torch.bfloat16)
    shape = StepShape([1] * tokens, [1] * tokens, [[i] for i in range(tokens)])
    if not decodes:
        shape = StepShape([tokens], [tokens], [list(range(tokens // 16))])
    backend = make(pool, layout, 1, StepLimits(tokens, tokens, tokens), dtype=torch.bfloat16)
    backend.plan(shape).attend(LAYER, query, key, value, Scoring(1.0))
    stored = pool[:, :, LAYER, :, 0].transpose(0, 1) if decodes else _in_order(pool[: tokens // 16, :, LAYER])
    wanted = numbers[:, 0].float().clamp(-448, 448).to(EIGHT)
    assert torch.equal(stored.permute(2, 0, 1, 3).float(), wanted.float())


def _in_order(pages: torch.Tensor) -> torch.Tensor:
    """Return [heads, tokens, 2, dim] of pages [P, heads, 2, page, dim]."""
    return pages.permute(1, 0, 3, 2, 4).flatten(1, 2)


@pytest.mark.parametrize("make", BACKENDS, ids=NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 2], ids=["a decode", "a chunk"])
def test_nan_stays_nan_in_pages_and_when_it_is_read(make: MakeBackend, dtype: Dtype, length: int) -> None:
    """It became 448, so a later token's results were wrong but finite, and its request did not fail."""
    layout = case((1,), (1,), head_dim=32).layout
    pool = torch.zeros(1, 2, layout.layers, 2, 16, 32, dtype=EIGHT)
    query, new = (torch.zeros(1, 2, length, 32, dtype=getattr(torch, dtype)) for _ in range(2))
    numbers = torch.tensor([0.0, torch.nan, -torch.nan, torch.inf, -torch.inf], dtype=new.dtype)
    stored = torch.tensor([0.0, torch.nan, torch.nan, 448, -448])
    value = new.clone()
    value[..., :5] = numbers
    backend = make(pool, layout, 1, StepLimits(1, length, 4), dtype=new.dtype)
    out = backend.plan(StepShape([length], [length], [[0]])).attend(LAYER, query, new, value, Scoring(1.0))
    torch.testing.assert_close(pool[0, 0, LAYER, 1, 0, :5].float(), stored, rtol=0, atol=0, equal_nan=True)
    if isinstance(backend, TritonAttention):
        return  # Triton's interpreter reads NaN as 480; GPUs have an instruction
    torch.testing.assert_close(out[0, -1, 0, :5].float(), stored, rtol=0, atol=0, equal_nan=True)
    out = backend.plan(StepShape([1], [length + 1], [[0]])).attend(
        LAYER, query[:, :, :1], new[:, :, :1], new[:, :, :1], Scoring(1.0)
    )
    assert torch.equal(out[0, 0, 0, :5].isnan(), stored.isnan())


@pytest.mark.parametrize("make", BACKENDS, ids=NAMES)
def test_a_request_gets_the_same_bits_alone_and_in_any_batch(make: MakeBackend) -> None:
    together = Outcome(case((1, 1, 20, 5), (40, 300, 20, 133)), make)
    first = 0
    for length, context, table in zip((1, 1, 20, 5), (40, 300, 20, 133), together.tables, strict=True):
        new = slice(first, first + length)
        query, key, value = (x[:, :, new] for x in (together.query, together.key, together.value))
        alone = make(together.before.clone(), together.case.layout, 3, together.case.limits, dtype=query.dtype)
        out = alone.plan(StepShape([length], [context], [table])).attend(LAYER, query, key, value, Scoring(0.3))
        assert torch.equal(out, together.out[:, new]) or isinstance(alone, PlainAttention), f"{length} of {context}"
        first += length
