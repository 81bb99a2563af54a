"""The whole engine gives the ids of transformers' generate, in fp32."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.core.engine_core import EngineCore
from engine.model.load import LoadedModel
from engine.ports import EngineRequest, FinishReason
from tests.engine.tiny_engine import EOS, greedy, load_tiny, make_engine, prompt, run, save_tiny

pytestmark = pytest.mark.usefixtures("pipeline")

# shorter than a page, a page but one, exactly a page, a page and one, two pages, several chunks of 48
LENGTHS = (1, 5, 15, 16, 17, 32, 48, 130)


class Reference:
    """transformers' generate over the same weights, once for each prompt and length."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._made = cache(self._make)

    def __call__(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        return list(self._made(tuple(token_ids), max_tokens))

    def _make(self, token_ids: tuple[int, ...], max_tokens: int) -> list[int]:
        ids = torch.tensor([token_ids])
        made = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
        )
        return made[0, ids.shape[1] :].tolist()


@pytest.fixture(scope="module")
def reference(tiny_dir: Path) -> Reference:
    return Reference(tiny_dir)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_alone_gives_the_ids_of_generate(engine: EngineCore, reference: Reference, length: int) -> None:
    seen = run(engine, [EngineRequest("r", prompt(length), greedy(40))])
    assert seen.tokens["r"] == reference(prompt(length), 40)


def test_eight_prompts_at_once_give_the_ids_of_generate(engine: EngineCore, reference: Reference) -> None:
    prompts = {f"r{length}": prompt(length, start=length) for length in LENGTHS}
    seen = run(engine, [EngineRequest(name, ids, greedy(24)) for name, ids in prompts.items()])
    assert max(stats.num_running for stats in seen.steps) == 8
    assert seen.tokens == {name: reference(ids, 24) for name, ids in prompts.items()}


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prefix_hit_changes_no_id(engine: EngineCore, reference: Reference, length: int) -> None:
    first = run(engine, [EngineRequest("first", prompt(length), greedy(24))])
    again = run(engine, [EngineRequest("again", prompt(length), greedy(24))])
    assert again.cached["again"] == max(0, length - 2) // 16 * 16
    assert first.cached["first"] == 0
    assert again.tokens["again"] == first.tokens["first"] == reference(prompt(length), 24)


def test_eight_prompts_behind_one_cached_prefix_give_the_ids_of_generate(
    engine: EngineCore, reference: Reference
) -> None:
    run(engine, [EngineRequest("warm", prompt(64), greedy(1))])
    prompts = {f"r{i}": prompt(64) + prompt(3 + 5 * i, start=i) for i in range(8)}
    seen = run(engine, [EngineRequest(name, ids, greedy(24)) for name, ids in prompts.items()])
    assert set(seen.cached.values()) == {64}
    assert seen.tokens == {name: reference(ids, 24) for name, ids in prompts.items()}


def test_pages_filled_while_decoding_are_found_by_a_longer_prompt(engine: EngineCore, reference: Reference) -> None:
    answer = run(engine, [EngineRequest("turn1", prompt(10), greedy(40, ignore_eos=True))]).tokens["turn1"]
    dialogue = prompt(10) + answer + prompt(5, start=3)
    seen = run(engine, [EngineRequest("turn2", dialogue, greedy(10))])
    assert seen.cached["turn2"] == 48
    assert seen.tokens["turn2"] == reference(dialogue, 10)


@pytest.mark.parametrize("page_size", [32, 64, 128])
@pytest.mark.parametrize("max_step_tokens", [18, 512])
def test_neither_page_size_nor_chunk_size_changes_an_id(
    tiny: LoadedModel, tiny_dir: Path, reference: Reference, page_size: int, max_step_tokens: int
) -> None:
    loaded = load_tiny(tiny_dir, page_size=page_size)
    sizes = {"page_size": page_size, "max_step_tokens": max_step_tokens, "num_pages": 1024 // page_size}
    seen = run(make_engine(loaded, **sizes), [EngineRequest("r", prompt(130), greedy(24))])
    assert seen.tokens["r"] == reference(prompt(130), 24)


@pytest.mark.parametrize(
    "changes",
    [{"num_key_value_heads": 4}, {"num_key_value_heads": 1}, {"head_dim": 32}, {"tie_word_embeddings": True}],
    ids=["multi-head", "multi-query", "own-head-dim", "tied-embeddings"],
)
def test_every_kind_of_heads_gives_the_ids_of_generate(tmp_path: Path, changes: dict[str, object]) -> None:
    directory = save_tiny(tmp_path / "other", **changes)
    reference = Reference(directory)
    prompts = {f"r{length}": prompt(length) for length in (7, 60)}
    engine = make_engine(load_tiny(directory))
    seen = run(engine, [EngineRequest(name, ids, greedy(16)) for name, ids in prompts.items()])
    assert seen.tokens == {name: reference(ids, 16) for name, ids in prompts.items()}


def test_an_end_token_is_the_last_one_and_stops_the_request(engine: EngineCore, reference: Reference) -> None:
    prompts = (prompt(9, start=start) for start in range(12))
    ended = next(((ids, made) for ids in prompts if (made := reference(ids, 200))[-1] == EOS), None)
    assert ended, "no prompt of these ends by itself"
    ids, made = ended
    seen = run(engine, [EngineRequest("r", ids, greedy(300))])
    assert seen.tokens["r"] == made
    assert seen.finish["r"] is FinishReason.STOP
