"""Models that make embeddings: transformers' own vectors, whatever shares the step, wherever chunks and pages begin."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from components.errors import PromptTooLong, Rejected
from components.wire.sampling import SamplingParams
from engine.core.engine_core import EngineCore
from engine.errors import ModelUnavailable, UnsupportedModel
from engine.model.load import LoadedModel
from engine.model.pooling import read_pooling
from engine.ports import EngineRequest, Phase
from tests.engine.embedding_model import SIZE, VOCAB, change, cosines, reference, save_embedding_model
from tests.engine.mock_engine import make_mock
from tests.engine.tiny_engine import check_pages, load_tiny, make_engine

MODES = ("lasttoken", "mean_tokens", "cls_token")
SAMPLING = SamplingParams(max_tokens=1, temperature=0)


def text(length: int, start: int = 0) -> list[int]:
    return [3 + (start * 31 + i * 17 + i * i // 7) % (VOCAB - 3) for i in range(length)]


TEXTS = [text(n, start=n) for n in (1, 5, 16, 33, 47, 48, 49, 130, 256)]


@pytest.fixture(scope="module")
def dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {mode: save_embedding_model(tmp_path_factory.mktemp("embed") / mode, mode) for mode in MODES}


@pytest.fixture(scope="module")
def loaded(dirs: dict[str, Path]) -> dict[str, LoadedModel]:
    return {mode: load_tiny(path) for mode, path in dirs.items()}


@pytest.fixture(scope="module")
def expected(dirs: dict[str, Path]) -> dict[str, npt.NDArray[np.float32]]:
    return {mode: reference(path, TEXTS, mode) for mode, path in dirs.items()}


def embed(engine: EngineCore, texts: Sequence[list[int]], salt: str = "") -> tuple[npt.NDArray[np.float32], list[int]]:
    """Vectors of texts submitted at once, and how much of each was cached."""
    for i, token_ids in enumerate(texts):
        engine.submit(EngineRequest(str(i), token_ids, SAMPLING, Phase.EMBED, salt))
    vectors, cached = {}, {}
    while engine.has_work():
        output = engine.step()
        assert (output.tokens, output.computed, output.failed) == ([], [], [])
        check_pages(engine)
        for done in output.embedded:
            vectors[done.request_id] = np.frombuffer(done.vector, "<f4")
            cached[done.request_id] = done.num_cached_tokens
    assert engine._memory.pool.num_held == 0
    return np.stack([vectors[str(i)] for i in range(len(texts))]), [cached[str(i)] for i in range(len(texts))]


@pytest.mark.parametrize("mode", MODES)
def test_vectors_are_those_of_transformers_in_any_company(
    loaded: dict[str, LoadedModel], expected: dict[str, npt.NDArray[np.float32]], mode: str, pipeline: str
) -> None:
    """Steps of 48 tokens: long texts come in chunks, between which others begin and end."""
    together, _ = embed(make_engine(loaded[mode]), TEXTS)
    assert together.shape == (len(TEXTS), SIZE)
    np.testing.assert_allclose(cosines(together, expected[mode]), 1, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    alone = np.concatenate([embed(make_engine(loaded[mode]), [one])[0] for one in TEXTS])
    np.testing.assert_allclose(together, alone, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_cached_prefix_is_used_where_only_the_last_state_counts(
    loaded: dict[str, LoadedModel], expected: dict[str, npt.NDArray[np.float32]], mode: str
) -> None:
    engine = make_engine(loaded[mode])
    embed(engine, [TEXTS[-1][:100]])
    vectors, cached = embed(engine, [TEXTS[-1]])
    assert cached == [96 if mode == "lasttoken" else 0]
    np.testing.assert_allclose(cosines(vectors, expected[mode][-1:]), 1, atol=1e-5)
    assert embed(engine, [TEXTS[-1]], salt="other")[1] == [0]


def test_a_text_that_nobody_waits_for_any_more_leaves_nothing(loaded: dict[str, LoadedModel], pipeline: str) -> None:
    engine = make_engine(loaded["mean_tokens"])
    engine.submit(EngineRequest("gone", TEXTS[-1], SAMPLING, Phase.EMBED))
    engine.step()
    engine.step()
    engine.cancel("gone")
    again, _ = embed(engine, TEXTS[-2:])
    np.testing.assert_allclose(again, embed(make_engine(loaded["mean_tokens"]), TEXTS[-2:])[0], atol=1e-6)


def test_an_embedding_model_embeds_and_others_generate(loaded: dict[str, LoadedModel], tiny: LoadedModel) -> None:
    embedding, generating = make_engine(loaded["lasttoken"]), make_engine(tiny)
    assert embedding.embedding is not None
    assert (embedding.embedding.dimensions, embedding.embedding.normalised) == (SIZE, True)
    assert generating.embedding is None
    for phase in (Phase.FULL, Phase.PREFILL, Phase.DECODE):
        with pytest.raises(Rejected, match="computes embeddings"):
            embedding.submit(EngineRequest("r", [3], SAMPLING, phase))
    with pytest.raises(Rejected, match="computes no embeddings"):
        generating.submit(EngineRequest("r", [3], SAMPLING, Phase.EMBED))


def test_a_text_may_fill_the_whole_context_and_no_more(loaded: dict[str, LoadedModel]) -> None:
    engine = make_engine(loaded["lasttoken"])
    assert len(TEXTS[-1]) == engine.max_context
    with pytest.raises(PromptTooLong, match=r"257.*256"):
        engine.submit(EngineRequest("r", text(257), SAMPLING, Phase.EMBED))


def test_a_mock_makes_vectors_up_from_the_text(dirs: dict[str, Path], tmp_path: Path) -> None:
    engines = [make_mock(tmp_path, model=f"mock:{dirs['mean_tokens']}") for _ in range(2)]
    (first, _), (second, _) = (embed(engine, TEXTS) for engine in engines)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(np.linalg.norm(first, axis=1), 1, atol=1e-5)
    assert np.abs(first @ first.T - np.eye(len(TEXTS))).max() < 0.7


@pytest.mark.parametrize(
    ("modules", "config", "found"),
    [
        (("Transformer", "Pooling"), {"architectures": ["Qwen3ForCausalLM"]}, ("mean", False)),
        ((), {"architectures": ["Qwen3Model"]}, ("last", True)),
        ((), {"architectures": ["GPT2LMHeadModel"]}, None),
        ((), {"architectures": ["Qwen3ForCausalLM"]}, None),
        ((), {"architectures": None}, None),
    ],
)
def test_what_a_directory_says(
    tmp_path: Path, modules: Sequence[str], config: dict[str, Any], found: tuple[str, bool] | None
) -> None:
    pooling = read_pooling("m", save_embedding_model(tmp_path, "mean_tokens", modules=modules, **config))
    assert (None if pooling is None else (pooling.mode, pooling.about.normalised)) == found


def test_a_directory_of_newer_files_with_limits(tmp_path: Path) -> None:
    save_embedding_model(tmp_path, matryoshka_dimensions=[16, 32])
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}')
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')
    pooling = read_pooling("m", tmp_path)
    assert pooling is not None
    assert (pooling.mode, pooling.max_tokens) == ("last", 40)
    assert (pooling.about.matryoshka, pooling.about.matryoshka_dimensions) == (True, [16, 32])
    assert make_engine(load_tiny(tmp_path)).max_context == 40


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("modules.json", '[{"idx": 0}]'),
        ("modules.json", '{"type": "Transformer"}'),
        ("1_Pooling/config.json", "[]"),
        ("sentence_bert_config.json", '{"max_seq_length": "long"}'),
    ],
)
def test_files_that_describe_no_pooling_are_named(tmp_path: Path, file: str, content: str) -> None:
    save_embedding_model(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(ModelUnavailable, match=re.escape(str(tmp_path / file))):
        load_tiny(tmp_path)


def test_what_is_not_computed_is_refused_by_name(tmp_path: Path) -> None:
    save_embedding_model(tmp_path, modules=("Transformer", "Pooling", "Dense"))
    with pytest.raises(UnsupportedModel, match="Dense"):
        load_tiny(tmp_path)
    save_embedding_model(tmp_path, "max_tokens")
    with pytest.raises(UnsupportedModel, match="max_tokens"):
        load_tiny(tmp_path)
    save_embedding_model(tmp_path)
    with pytest.raises(UnsupportedModel, match="LoRA"):
        load_tiny(tmp_path, lora={"a": "b"})


def test_attention_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    """As of models that were made bidirectional: here they would be computed as if they were causal."""
    save_embedding_model(tmp_path)
    change(tmp_path / "config.json", {"is_causal": False})
    with pytest.raises(UnsupportedModel, match="causal"):
        make_engine(load_tiny(tmp_path))
