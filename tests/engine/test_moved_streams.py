"""Another engine continues a stream with the same bits, from a prompt that ends with the generated tokens.

In bfloat16, the default, this needs the compiled products (AVX2 or newer): sums of oneDNN depend on the number of rows.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
from transformers import AutoTokenizer

from components.wire.logprobs import TokenLogprobs
from components.wire.sampling import SamplingParams
from engine.build import assemble, build_engine
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.kernels.linear import can_pack, pack_linears
from engine.ports import EngineRequest
from tests.engine.tiny_engine import VOCAB, load_tiny, prompt, run, save_tiny, small

LENGTH: Final = 64
TEXTS: Final = (
    "Once upon a time in a small village",
    "The capital of France is",
    "def fibonacci(n):",
    "Dear landlord, the heating in my flat",
    "1, 1, 2, 3, 5, 8,",
    "Climate change affects",
    "Q: Why is the sky blue? A:",
    "The three laws of robotics are",
)
Written = tuple[list[int], list[TokenLogprobs]]


@pytest.fixture(autouse=True)
def _needs_products(kernel: str | None) -> None:
    if kernel is not None:
        pytest.skip(kernel)
    if not can_pack():
        pytest.skip("this processor has neither AVX2 nor AVX-512")


def sampling(max_tokens: int, seed: int | None) -> SamplingParams:
    """Greedy without a seed."""
    temperature, draws = (0.0, 0) if seed is None else (0.8, seed)
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=draws, ignore_eos=True, logprobs=3)


def written(
    engine: EngineCore, prompts: Sequence[Sequence[int]], cut: int, seed: int | None, salt: str
) -> list[Written]:
    """Return the output for prompts with `cut` generated tokens."""
    asked = [
        EngineRequest(f"{i}", ids, sampling(LENGTH - cut, seed), cache_salt=salt, num_generated=cut)
        for i, ids in enumerate(prompts)
    ]
    seen = run(engine, asked)
    return [(seen.tokens[f"{i}"], seen.logprobs[f"{i}"]) for i in range(len(prompts))]


def moved_streams_go_on(
    engine: EngineCore, prompts: Sequence[Sequence[int]], cuts: Sequence[int], seed: int | None
) -> None:
    """`cuts`: numbers of tokens generated before the streams move.

    Log-probabilities are compared too: equal tokens may come from logits that differ.
    """
    undisturbed = written(engine, prompts, 0, seed, "whole")
    for cut in cuts:
        moved = [[*ids, *tokens[:cut]] for ids, (tokens, _) in zip(prompts, undisturbed, strict=True)]
        rest = written(engine, moved, cut, seed, f"from {cut}")
        assert rest == [(tokens[cut:], told[cut:]) for tokens, told in undisturbed], cut


@pytest.mark.parametrize("seed", [None, 7], ids=["greedy", "drawn"])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_a_moved_stream_of_a_small_model_goes_on_as_it_would_have(
    tmp_path: Path, kv_dtype: str, seed: int | None
) -> None:
    directory = save_tiny(tmp_path / "tiny", vocab_size=VOCAB)
    loaded = load_tiny(directory, dtype="bfloat16", kv_dtype=kv_dtype)
    assert pack_linears(loaded.module)
    engine = assemble(loaded, small(dtype="bfloat16", num_pages=400, max_step_tokens=100))
    moved_streams_go_on(engine, [prompt(9 + 37 * i, start=i) for i in range(6)], (1, 16, 40, LENGTH - 1), seed)


@pytest.mark.model
@pytest.mark.timeout(300)
def test_a_moved_stream_of_the_default_model_goes_on_as_it_would_have(state_home: Path, real_model_dir: Path) -> None:
    """In bfloat16, greedy text of 300 tokens changed in four of four moves."""
    config = EngineConfig(num_pages=1000, max_running=8, compile="off", threads=len(os.sched_getaffinity(0)))
    engine = build_engine(str(real_model_dir), config, state_home)
    tokenizer = AutoTokenizer.from_pretrained(real_model_dir)
    moved_streams_go_on(
        engine, [tokenizer(f"{line} {line}")["input_ids"] for line in TEXTS], (16, LENGTH - 1), seed=None
    )
