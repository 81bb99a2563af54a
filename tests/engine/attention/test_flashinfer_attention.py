"""Our use of flashinfer, with a stand-in for its wrappers."""

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from bench.attention_case import AttentionCase, Outcome, written_out
from engine.attention.backend import AttentionBackend, Scoring, StepShape
from engine.attention.choose_attention import AttentionUnavailable
from engine.errors import UnsupportedModel

CASE = AttentionCase((1, 1, 20, 5), (4, 33, 20, 70), dtype="bfloat16", head_dim=64)


class Wrapper:
    """The common part of both wrappers: a plan, then runs over it."""

    plans = 0
    query_starts: torch.Tensor

    def __init__(self, workspace: torch.Tensor, kv_layout: str, use_tensor_cores: bool = False) -> None:
        assert kv_layout == "HND"

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[T, heads, head_dim] of packed queries; strided views of pages, of equal strides."""
        assert kv[0].stride() == kv[1].stride()
        outputs = []
        for i, last in enumerate(self.last_page_lens.tolist()):
            pages = self.pages[self.page_starts[i] : self.page_starts[i + 1]].long()
            context = (len(pages) - 1) * self.page_size + last
            keys, values = (x[pages].transpose(0, 1).flatten(1, 2)[:, :context] for x in kv)
            mine = q[self.query_starts[i] : self.query_starts[i + 1]].transpose(0, 1)
            outputs.append(written_out(mine, keys, values, self.scoring).to(q.dtype))
        return torch.cat(outputs)

    def _note(self, starts: Any, pages: Any, lasts: Any, page_size: int, options: dict[str, Any]) -> None:
        Wrapper.plans += 1
        self.page_starts, self.pages, self.last_page_lens, self.page_size = starts, pages, lasts, page_size
        assert options["q_data_type"] == options["kv_data_type"]
        window = options["window_left"] + 1
        self.scoring = Scoring(options["sm_scale"], window, options["logits_soft_cap"])


class Decode(Wrapper):
    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        self.query_starts = torch.arange(len(last_page_len) + 1)
        self._note(indptr, indices, last_page_len, page_size, options)


class Prefill(Wrapper):
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        **options: Any,
    ) -> None:
        assert causal
        self.query_starts = qo_indptr
        self._note(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, options)


def append(
    key: torch.Tensor,
    value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str,
) -> None:
    assert kv_layout == "HND"
    page_size = kv[0].shape[2]
    pages = kv_indices[kv_indptr[batch_indices] + positions // page_size]
    for cache, new in zip(kv, (key, value), strict=True):
        cache[pages, :, positions % page_size] = new


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., AttentionBackend]]:
    stand_in = ModuleType("flashinfer")
    for public, part in {
        "BatchDecodeWithPagedKVCacheWrapper": Decode,
        "BatchPrefillWithPagedKVCacheWrapper": Prefill,
        "append_paged_kv_cache": append,
    }.items():
        setattr(stand_in, public, part)
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    name = "engine.attention.flashinfer_backend"
    yield importlib.import_module(name).FlashInferAttention
    sys.modules.pop(name)


@pytest.mark.parametrize("scoring", [Scoring(0.3), Scoring(0.3, window=7), Scoring(0.2, 20, 5.0)], ids=str)
@pytest.mark.parametrize("lengths", [((1, 1, 20, 5), (4, 33, 20, 70)), ((1, 1), (16, 17)), ((5,), (5,))], ids=str)
def test_spans_tables_and_scoring_reach_the_wrappers_as_they_are_meant(
    make: Callable[..., AttentionBackend], lengths: tuple[tuple[int, ...], tuple[int, ...]], scoring: Scoring
) -> None:
    queries, contexts = lengths
    Outcome(replace(CASE, query_lens=queries, context_lens=contexts, scoring=scoring), make).check()


def test_a_step_is_planned_once_for_each_scoring_whatever_the_layers(make: Callable[..., AttentionBackend]) -> None:
    outcome = Outcome(CASE, make)
    Wrapper.plans = 0
    step = outcome.backend.plan(StepShape(CASE.query_lens, CASE.context_lens, outcome.tables))
    for layer, scoring in enumerate([Scoring(0.3), Scoring(0.3, window=7), Scoring(0.3)]):
        step.attend(layer, outcome.query, outcome.key, outcome.value, scoring)
    assert Wrapper.plans == 4, "decodes and chunks, with a window and without"


def test_a_plan_leaves_that_of_the_step_which_still_runs_as_it_was(make: Callable[..., AttentionBackend]) -> None:
    outcome = Outcome(CASE, make)
    inputs = outcome.query, outcome.key, outcome.value
    running = outcome.backend.plan(StepShape(CASE.query_lens, CASE.context_lens, outcome.tables))
    attended = running.attend(0, *inputs, Scoring(0.3))
    following = outcome.backend.plan(StepShape(CASE.query_lens[:2], CASE.context_lens[:2], outcome.tables[:2]))
    query, key, value = (x[:, :, :2] for x in inputs)
    following.attend(0, query, key, value, Scoring(0.3))
    assert torch.equal(running.attend(0, *inputs, Scoring(0.3)), attended)


def test_sinks_are_refused(make: Callable[..., AttentionBackend]) -> None:
    with pytest.raises(UnsupportedModel, match="no attention sinks: try attention=triton"):
        Outcome(replace(CASE, sinks=True), make)


@pytest.mark.parametrize("changes", [{"dtype": "float32"}, {"head_dim": 80}], ids=str)
def test_what_its_kernels_do_not_compute_is_refused(
    make: Callable[..., AttentionBackend], changes: dict[str, Any]
) -> None:
    with pytest.raises(AttentionUnavailable, match="try attention=triton"):
        Outcome(replace(CASE, **changes), make)
