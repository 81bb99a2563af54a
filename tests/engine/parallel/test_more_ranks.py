"""Other shapes: KV heads on several ranks, biases, embeddings, the default model."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from components.wire.sampling import SamplingParams
from engine.model.load import LoadedModel
from engine.ports import EngineRequest
from tests.engine.embedding_model import save_embedding_model
from tests.engine.model.families import FAMILIES, save_model
from tests.engine.parallel.led import led
from tests.engine.test_embeddings import TEXTS, embed
from tests.engine.tiny_engine import greedy, load_tiny, make_engine, prompt, run, save_tiny


def test_ranks_beyond_the_kv_heads_share_them(tmp_path: Path, kernel: str | None) -> None:
    """Also, a bias is added only once."""
    biased = {"attention_bias": True, "mlp_bias": True, "initializer_range": 0.2}
    directory = save_tiny(tmp_path / "biased", **biased)
    randomise_biases(directory)
    seeded = SamplingParams(max_tokens=30, temperature=1.0, seed=3, ignore_eos=True)
    requests = [EngineRequest(f"r{i}", prompt(20 + 13 * i, start=i), [seeded, greedy(30)][i % 2]) for i in range(4)]
    wanted = run(make_engine(load_tiny(directory)), requests).tokens
    with led(directory, 4) as four:
        assert four.loaded.layout.heads == range(1)
        assert run(four.make(), requests).tokens == wanted


def test_sinks_of_a_rank_are_those_of_its_heads(tmp_path: Path, kernel: str | None) -> None:
    directory = save_model(tmp_path / "model", FAMILIES["gpt-oss"]())
    requests = [EngineRequest(f"r{i}", prompt(20 + 40 * i, start=i), greedy(20)) for i in range(3)]
    wanted = run(make_engine(load_tiny(directory)), requests).tokens
    with led(directory, 2) as two:
        assert run(two.make(), requests).tokens == wanted


def test_ranks_release_the_pages_that_every_layer_has_left(
    windowed_dir: Path, windowed: LoadedModel, kernel: str | None
) -> None:
    """Without it, requests in this pool would be preempted."""
    requests = [EngineRequest(f"r{i}", prompt(60, start=i), greedy(60, ignore_eos=True)) for i in range(4)]
    wanted = run(make_engine(windowed), requests).tokens
    with led(windowed_dir, 2) as two:
        seen = run(two.make(num_pages=18), requests)
    assert seen.tokens == wanted
    assert seen.steps[-1].preemptions == 0
    assert max(stats.num_running for stats in seen.steps) == 4


def randomise_biases(directory: Path) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    draw = torch.Generator().manual_seed(4)
    for name, tensor in tensors.items():
        if name.endswith(".bias"):
            tensors[name] = torch.randn(tensor.shape, generator=draw) * 0.3
    save_file(tensors, path, {"format": "pt"})


def test_vectors_of_an_embedding_model_are_those_of_one_rank(tmp_path: Path, kernel: str | None) -> None:
    """Its file has names without the prefix that a model with an output layer has."""
    directory = save_embedding_model(tmp_path / "embeds", "mean_tokens")
    wanted, _ = embed(make_engine(load_tiny(directory)), TEXTS)
    with led(directory, 2) as two:
        vectors, _ = embed(two.make(), TEXTS)
    np.testing.assert_allclose(vectors, wanted, atol=1e-5)


@pytest.mark.model
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.faults)])
def test_the_default_model_on_ranks_writes_what_it_writes_on_one(
    real_model_dir: Path, size: int, kernel: str | None
) -> None:
    """Nine query heads and three KV heads, in fp32: of two ranks the second has twice as many."""
    tokenizer = AutoTokenizer.from_pretrained(real_model_dir)
    texts = ("The capital of France is", "Once upon a time there was a", "def fibonacci(n):")
    requests = [
        EngineRequest(f"{how}{i}", tokenizer.encode(text), sampling)
        for i, text in enumerate(texts)
        for how, sampling in (
            ("greedy", greedy(24, ignore_eos=True)),
            ("seeded", SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=i, ignore_eos=True)),
        )
    ]
    wanted = run(make_engine(load_tiny(real_model_dir)), requests).tokens
    with led(real_model_dir, size) as ranks:
        seen = run(ranks.make(), requests)
    assert seen.tokens == wanted
    assert " Paris" in tokenizer.decode(seen.tokens["greedy0"])
