"""An engine whose pages hold 8-bit floats gives the ids of transformers with keys and values that are rounded to them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from components.errors import IncompatibleLayout, NonFiniteLogits
from components.wire.layout import check_compatible
from components.wire.sampling import SamplingParams
from engine.config import AttentionKind
from engine.kv.page_files import directory_name
from engine.model.load import LoadedModel
from engine.ports import EngineRequest
from tests.engine.model.families import FAMILIES, save_model
from tests.engine.test_batch_invariance import PROMPT, SITUATIONS, Situation, by_two_engines, prepared
from tests.engine.tiny_engine import (
    alone,
    greedy,
    load_tiny,
    make_engine,
    offload_gb,
    prompt,
    run,
    save_tiny,
)

pytestmark = pytest.mark.usefixtures("pipeline")

EIGHT = "fp8_e4m3"
SEEDED = SamplingParams(max_tokens=40, temperature=1.0, top_p=0.9, seed=11, ignore_eos=True)


def rounded(number: torch.Tensor) -> torch.Tensor:
    return number.clamp(-448, 448).to(torch.float8_e4m3fn).to(number.dtype)


def attend_to_rounded(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **more: Any
) -> Any:
    return sdpa_attention_forward(module, query, rounded(key), rounded(value), *rest, **more)


@pytest.fixture(scope="module")
def reference(tiny_dir: Path) -> Callable[[Sequence[int], int], list[int]]:
    AttentionInterface.register("rounded", attend_to_rounded)
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32, attn_implementation="rounded")

    def generate(token_ids: Sequence[int], max_tokens: int) -> list[int]:
        ids = torch.tensor([list(token_ids)])
        mask = torch.ones_like(ids)
        made = model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
        return made[0, ids.shape[1] :].tolist()

    return generate


@pytest.fixture(scope="module")
def eight(tiny_dir: Path) -> LoadedModel:
    return load_tiny(tiny_dir, kv_dtype=EIGHT)


@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_ids_are_those_of_transformers_with_rounded_keys_and_values(
    eight: LoadedModel,
    tiny: LoadedModel,
    reference: Callable[[Sequence[int], int], list[int]],
    attention: AttentionKind,
) -> None:
    prompts = {f"r{length}": prompt(length, start=length) for length in (1, 15, 16, 17, 48, 130)}
    asked = [EngineRequest(name, ids, greedy(24)) for name, ids in prompts.items()]
    engine = make_engine(eight, attention=attention)
    found = run(engine, asked).tokens
    assert found == {name: reference(ids, 24) for name, ids in prompts.items()}
    assert found != run(make_engine(tiny), asked).tokens, "rounding changes an id of this model"
    assert engine.kv_region.layout.page_bytes * 4 == tiny.layout.page_bytes


CHOSEN = ("among 31 others", "behind a long prefix hit", "preempted, in small chunks", "in chunks of 17")


@pytest.mark.parametrize("situation", [SITUATIONS[name] for name in CHOSEN], ids=CHOSEN)
def test_batches_caches_chunks_and_transfers_change_no_id(eight: LoadedModel, situation: Situation) -> None:
    wanted = alone(eight, PROMPT, SEEDED, max_step_tokens=512, pipeline="off")
    assert run(prepared(eight, situation), [EngineRequest("r", PROMPT, SEEDED)]).tokens["r"] == wanted
    assert by_two_engines(prepared(eight, situation), prepared(eight, situation), SEEDED) == wanted


def test_pages_come_back_from_main_memory_and_from_files(eight: LoadedModel, tmp_path: Path) -> None:
    first, second = prompt(100), prompt(100, start=9)
    wanted = alone(eight, first, SEEDED)
    offloading = make_engine(eight, num_pages=12, reserve_tokens=0, kv_offload_gb=offload_gb(eight.layout, 30))
    saving = make_engine(eight, kv_store_dir=tmp_path)
    for i, ids in enumerate((first, second)):
        for engine in (offloading, saving):
            run(engine, [EngineRequest(f"r{i}", ids, SEEDED)])
    saving.close()
    loading = make_engine(eight, kv_store_dir=tmp_path)
    for engine in (offloading, loading):
        seen = run(engine, [EngineRequest("again", first, SEEDED)])
        assert (seen.tokens["again"], seen.cached["again"]) == (wanted, 96)
        engine.close()


@pytest.mark.parametrize("family", ["mistral-window", "deepseek-v3"])
def test_windows_and_latents_give_the_same_ids_in_chunks_and_whole(tmp_path: Path, family: str) -> None:
    loaded = load_tiny(save_model(tmp_path / "model", FAMILIES[family]()), kv_dtype=EIGHT)
    wanted = alone(loaded, prompt(90), SEEDED, max_step_tokens=512, pipeline="off")
    assert loaded.layout.dtype == EIGHT
    engine = make_engine(loaded, max_step_tokens=17, max_running=3)
    assert run(engine, [EngineRequest("r", prompt(90), SEEDED)]).tokens["r"] == wanted


def test_pages_of_a_model_in_another_dtype_are_not_used(tiny_dir: Path, eight: LoadedModel) -> None:
    """They were, so a request's bits depended on the worker that had computed its prompt."""
    other = load_tiny(tiny_dir, kv_dtype=EIGHT, dtype="bfloat16").layout
    with pytest.raises(IncompatibleLayout, match=r"\(model: tiny-llama@\w+, float32 here, tiny-llama@\w+ there\)"):
        check_compatible(eight.layout, other)
    assert directory_name(eight.layout) != directory_name(other)
    with pytest.raises(IncompatibleLayout, match=r"\(dtype: fp8_e4m3 here, bfloat16 there\)"):
        check_compatible(other, load_tiny(tiny_dir, dtype="bfloat16").layout)


@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_a_prompt_whose_keys_are_nan_fails(tmp_path: Path, attention: AttentionKind) -> None:
    """NaN became 448 in pages, so the request got an answer, and others found its pages."""
    model = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path / "tiny"))
    with torch.no_grad():
        model.get_input_embeddings().weight[prompt(40)[5]] = torch.nan
    model.save_pretrained(tmp_path / "broken")
    for kv_dtype in ("auto", EIGHT):
        engine = make_engine(load_tiny(tmp_path / "broken", kv_dtype=kv_dtype), attention=attention)
        seen = run(engine, [EngineRequest("r", prompt(40), SEEDED)])
        assert type(seen.failed["r"].error) is NonFiniteLogits, kv_dtype
