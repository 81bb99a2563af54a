"""The C++ kernel, compared with attention written out, and its errors."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.attention_case import AttentionCase, Dtype, Outcome
from components.wire.layout import KvLayout
from engine.attention.backend import Scoring, StepShape
from engine.attention.choose_attention import AttentionUnavailable, make_attention, prepare_attention, why_not_cpu
from engine.attention.cpu import CpuAttention, pack_plan
from engine.attention.plain import PlainAttention
from engine.attention.step_tables import StepLimits
from engine.kernels import native_library
from engine.kernels.native_library import KernelsUnavailable, load_kernels
from tests.engine.attention.makers import make_cpu

LAYERS = 3
LIMITS = StepLimits(requests=2, tokens=8, context=64)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
STEPS = [  # query lengths, contexts
    ([1], [1]),
    ([1, 1, 1], [3, 16, 600]),  # the last is cut into spans
    ([7], [7]),
    ([150], [150]),  # more than a tile and a block of keys
    ([33], [300]),  # mostly cached
    ([1, 1, 20, 5], [4, 33, 20, 70]),
]


@pytest.fixture(autouse=True)
def _needs_kernel(kernel: str | None) -> None:
    if kernel is not None:
        pytest.skip(kernel)


def layout(heads: int, page_size: int, dim: int, dtype: torch.dtype) -> KvLayout:
    name = str(dtype).removeprefix("torch.")
    return KvLayout(model="m", dtype=name, page_size=page_size, layers=LAYERS, kv_heads=heads, head_dim=dim)


def expected(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Return [T, heads, D] of the last T queries [heads, T, D] over keys and values [kv_heads, S, D], in fp32."""
    group = query.shape[0] // keys.shape[0]
    keys, values = (x.float().repeat_interleave(group, dim=0) for x in (keys, values))
    scores = query.float() @ keys.transpose(1, 2) * scoring.scaling
    if scoring.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    length, context = scores.shape[1:]
    ages = torch.arange(context - length, context)[:, None] - torch.arange(context)
    hidden = (ages < 0) | (ages >= (scoring.window or context))
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1)


class Case:
    """A pool with pages in any order, and one step over it."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, lens: list[int], contexts: list[int]):
        heads, group, page_size, dim = shape
        self.lens, self.contexts = lens, contexts
        self.layout = layout(heads, page_size, dim, dtype)
        pages_each = [self.layout.pages_for(context) for context in contexts]
        shuffled = iter(torch.randperm(sum(pages_each) + 3).tolist())
        self.tables = [[next(shuffled) for _ in range(count)] for count in pages_each]
        self.pool = torch.randn(sum(pages_each) + 3, heads, LAYERS, 2, page_size, dim).to(dtype)
        total = sum(lens)
        # as a model has them: a view of [tokens, heads * dim]
        self.query = torch.randn(1, total, heads * group, dim).to(dtype).transpose(1, 2)
        self.key, self.value = torch.randn(2, 1, total, heads, dim).to(dtype).transpose(2, 3)

    def step(self) -> StepShape:
        return StepShape(self.lens, self.contexts, self.tables)

    def check(self, out: torch.Tensor, before: torch.Tensor, layer: int, scoring: Scoring) -> None:
        first = 0
        for length, context, table in zip(self.lens, self.contexts, self.tables, strict=True):
            new = slice(first, first + length)
            stood = before[table, :, layer].permute(2, 1, 0, 3, 4).flatten(2, 3)  # [2, kv_heads, pages * page, D]
            keys = torch.cat([stood[0, :, : context - length], self.key[0, :, new]], dim=1)
            values = torch.cat([stood[1, :, : context - length], self.value[0, :, new]], dim=1)
            wanted = expected(self.query[0, :, new], keys, values, scoring)
            worst = TOLERANCE[self.pool.dtype]
            torch.testing.assert_close(out[0, new].float(), wanted, atol=worst, rtol=worst)
            first += length


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("lens", "contexts"), STEPS)
@pytest.mark.parametrize("scoring", [Scoring(0.3), Scoring(0.3, window=20), Scoring(0.3, softcap=2.0)])
def test_each_request_attends_to_its_own_context(
    dtype: torch.dtype, lens: list[int], contexts: list[int], scoring: Scoring
) -> None:
    torch.manual_seed(0)
    case = Case((2, 3, 16, 32), dtype, lens, contexts)
    before = case.pool.clone()
    out = CpuAttention(case.pool, case.layout).plan(case.step()).attend(1, case.query, case.key, case.value, scoring)
    assert out.shape == (1, sum(lens), 6, 32)
    case.check(out, before, 1, scoring)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("lens", "contexts"), STEPS)
@pytest.mark.parametrize("scoring", [Scoring(0.3), Scoring(0.3, 20, 2.0)], ids=["plain", "windowed and capped"])
def test_sinks_join_the_softmax_without_a_value(
    dtype: Dtype, lens: list[int], contexts: list[int], scoring: Scoring
) -> None:
    Outcome(AttentionCase(tuple(lens), tuple(contexts), scoring, dtype, head_dim=32, sinks=True), make_cpu).check()


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("heads", "group"), [(4, 1), (2, 7), (1, 8), (1, 40)], ids=["multi-head", "grouped", "multi-query", "many queries"]
)
@pytest.mark.parametrize("dim", [16, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_page_size_grouping_and_head_size(
    page_size: int, heads: int, group: int, dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    case = Case((heads, group, page_size, dim), dtype, [1, 1, 40], [300, 17, 90])
    before = case.pool.clone()
    step = CpuAttention(case.pool, case.layout).plan(case.step())
    case.check(step.attend(2, case.query, case.key, case.value, Scoring(0.1)), before, 2, Scoring(0.1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("context", [1, 2, 15, 17, 33, 290, 291])
@pytest.mark.parametrize("window", [0, 14, 21])
def test_what_others_left_in_a_page_is_not_seen(dtype: torch.dtype, context: int, window: int) -> None:
    """Rows behind the context, and before a decode's window, have no effect, not even NaN."""
    torch.manual_seed(0)
    for length in {1, context}:
        case = Case((2, 3, 16, 32), dtype, [length], [context])
        pages = case.pool[case.tables[0]].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)  # [heads, layers, 2, rows, D]
        pages[..., context:, :] = torch.nan
        if window and length == 1:
            pages[..., : max(0, context - window), :] = torch.nan
        case.pool[case.tables[0]] = pages.reshape(2, 3, 2, -1, 16, 32).permute(3, 0, 1, 2, 4, 5)
        step = CpuAttention(case.pool, case.layout).plan(case.step())
        assert step.attend(1, case.query, case.key, case.value, Scoring(0.1, window)).isfinite().all()


def test_it_writes_what_the_plain_backend_writes_and_nothing_else() -> None:
    torch.manual_seed(0)
    case = Case((2, 3, 16, 32), torch.bfloat16, [1, 20, 130], [40, 50, 130])
    other = case.pool.clone()
    PlainAttention(other, case.layout, 3).plan(case.step()).attend(1, case.query, case.key, case.value, Scoring(0.3))
    CpuAttention(case.pool, case.layout).plan(case.step()).attend(1, case.query, case.key, case.value, Scoring(0.3))
    assert torch.equal(case.pool, other)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_request_gives_the_same_bits_in_any_batch_and_with_any_number_of_threads(threads: int) -> None:
    torch.manual_seed(0)
    case = Case((2, 3, 16, 32), torch.float32, [1, 1, 1, 90], [700, 5, 513, 200])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        step = CpuAttention(case.pool, case.layout).plan(case.step())
        together = step.attend(0, case.query, case.key, case.value, Scoring(0.3))
        first = 0
        for length, context, table in zip(case.lens, case.contexts, case.tables, strict=True):
            query, key, value = (x[:, :, first : first + length] for x in (case.query, case.key, case.value))
            alone = CpuAttention(case.pool, case.layout).plan(StepShape([length], [context], [table]))
            assert torch.equal(alone.attend(0, query, key, value, Scoring(0.3)), together[:, first : first + length])
            first += length
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("shape", "scoring"),
    [
        ((3, 3, 16, 64), Scoring(0.125)),
        ((1, 5, 32, 32), Scoring(0.2, window=70)),
        ((2, 1, 16, 80), Scoring(0.1, softcap=20.0)),
        ((1, 8, 64, 128), Scoring(0.09)),
        ((1, 20, 16, 64), Scoring(0.125)),
    ],
)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_token_gets_the_same_bits_as_a_decode_and_in_any_chunk_of_a_prompt(
    dtype: torch.dtype, shape: tuple[int, int, int, int], scoring: Scoring, with_sinks: bool
) -> None:
    """Decodes and prompts added in different orders: a stream that moved to another worker got other text."""
    torch.manual_seed(0)
    length = 600
    case = Case(shape, dtype, [length], [length])
    sinks = torch.randn(shape[0] * shape[1]) if with_sinks else None

    def in_chunks(*ends: int) -> torch.Tensor:
        attention, first, parts = CpuAttention(case.pool, case.layout), 0, []
        for end in ends:
            step = attention.plan(StepShape([end - first], [end], case.tables))
            query, key, value = (x[:, :, first:end] for x in (case.query, case.key, case.value))
            parts.append(step.attend(0, query, key, value, scoring, sinks=sinks))
            first = end
        return torch.cat(parts, dim=1)

    whole = in_chunks(length)
    assert torch.equal(in_chunks(77, 203, 499, length), whole)
    assert torch.equal(in_chunks(*range(1, length + 1)), whole)
    assert torch.equal(in_chunks(150, *range(151, 400), length), whole)


def test_tokens_beyond_the_plan_are_zero_and_write_nothing() -> None:
    torch.manual_seed(0)
    case = Case((2, 3, 16, 32), torch.float32, [1, 1], [9, 20])
    step = CpuAttention(case.pool, case.layout).plan(StepShape([1], [9], case.tables[:1]))
    untouched = case.pool[case.tables[1]].clone()
    out = step.attend(0, case.query, case.key, case.value, Scoring(0.3))
    assert out[:, 0].any()
    assert not out[:, 1].any()
    assert torch.equal(case.pool[case.tables[1]], untouched)


def test_a_plan_that_does_not_fit_is_an_error() -> None:
    case = Case((2, 3, 16, 32), torch.float32, [1], [9])
    step = CpuAttention(case.pool, case.layout).plan(case.step())
    arguments = case.key, case.value, case.pool
    tail = 0, 0.3, 0, 0.0
    with pytest.raises(RuntimeError):
        torch.ops.kvmesh.attend_pages(case.query, *arguments, step.plan[:-1], *tail)
    with pytest.raises(RuntimeError):
        torch.ops.kvmesh.attend_pages(case.query, *arguments, step.plan.long(), *tail)
    with pytest.raises(RuntimeError):
        torch.ops.kvmesh.attend_pages(case.query.half(), *arguments, step.plan, *tail)
    two = pack_plan([1, 1], [9, 9], case.tables * 2, 1)
    with pytest.raises(RuntimeError):
        torch.ops.kvmesh.attend_pages(case.query, *arguments, two, *tail)


GOOD: dict[str, Any] = {
    "lens": [2, 1],
    "contexts": [18, 5],
    "tables": [[0, 1], [2, 0]],
    "layer": 1,
    "tokens": 3,
    "page": 16,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": 2}, "no such layer"),
        ({"layer": -1}, "no such layer"),
        ({"tables": [[0, 3], [2, 0]]}, "is not in the pool"),
        ({"tables": [[0, -1], [2, 0]]}, "is not in the pool"),
        ({"contexts": [1, 5]}, "shorter than its chunk"),
        ({"contexts": [18, 33]}, "longer than its block table"),
        ({"tokens": 2}, "more tokens than the query"),
        ({"lens": [-1, 1]}, "overlap"),
        ({"page": 8, "contexts": [9, 5]}, "multiple of 16 tokens"),
        ({"values": 2}, "key and value differ"),
        ({"cut": 2}, "shorter than it says"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_plan_that_is_wrong_is_refused_and_nothing_is_written(change: dict[str, Any], message: str) -> None:
    """The kernel did not check it: a missing layer was written into the next page, or beyond the heap."""
    for what, refused in ((GOOD, False), (GOOD | change, True)):
        pool = torch.zeros(3, 1, 2, 2, what["page"], 16)
        query, key = torch.ones(1, 2, what["tokens"], 16), torch.ones(1, 1, what["tokens"], 16)
        plan = pack_plan(what["lens"], what["contexts"], what["tables"], 2)
        value = torch.ones(1, 1, what.get("values", what["tokens"]), 16)
        arguments = query, key, value, pool, plan[: what.get("cut", len(plan))], what["layer"], 1.0, 0, 0.0
        if refused:
            with pytest.raises(RuntimeError, match=message):
                torch.ops.kvmesh.attend_pages(*arguments)
        else:
            torch.ops.kvmesh.attend_pages(*arguments)
        assert bool(pool.any()) != refused


@pytest.mark.parametrize(
    ("sinks", "message"), [(torch.zeros(2), "one sink for each query head"), (torch.zeros(1).double(), "float32")]
)
def test_sinks_of_another_number_or_type_are_refused(sinks: torch.Tensor, message: str) -> None:
    one = torch.ones(1, 1, 1, 16)
    plan = pack_plan([1], [1], [[0]], 1)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.kvmesh.attend_pages(one, one, one, torch.zeros(1, 1, 1, 2, 16, 16), plan, 0, 1.0, 0, 0.0, sinks)


def test_which_backend_an_engine_gets() -> None:
    cpu = torch.device("cpu")
    usual, odd = layout(2, 16, 32, torch.float32), layout(2, 16, 24, torch.float32)
    assert why_not_cpu("auto", cpu, usual) is None
    assert "attention=torch" in str(why_not_cpu("torch", cpu, usual))
    assert "multiple of 16" in str(why_not_cpu("auto", cpu, odd))
    assert "cuda" in str(why_not_cpu("auto", torch.device("cuda:0"), usual))
    assert isinstance(make_attention("auto", torch.zeros(1), odd, 1, LIMITS), PlainAttention)
    with pytest.raises(AttentionUnavailable, match="multiple of 16"):
        make_attention("cpu", torch.zeros(1), odd, 1, LIMITS)


def test_a_machine_without_a_compiler_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_library, "kernels_are_loaded", lambda: False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(AttentionUnavailable, match="CXX"):
        prepare_attention("cpu", torch.device("cpu"), tmp_path)
    prepare_attention("auto", torch.device("cpu"), tmp_path)
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert "several times as slow" in warning.message
    assert "CXX" in vars(warning)["reason"]
    assert not list(tmp_path.iterdir())


def test_a_kernel_that_does_not_compile_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("this is no C++;")
    monkeypatch.setattr(native_library, "kernel_sources", lambda: [source])
    monkeypatch.setattr(native_library, "kernels_are_loaded", lambda: False)
    with pytest.raises(KernelsUnavailable, match=r"g\+\+ 12 or newer.*error"):
        load_kernels(tmp_path)
    assert [path.suffix for path in (tmp_path / "compile").iterdir()] == [".lock"]
