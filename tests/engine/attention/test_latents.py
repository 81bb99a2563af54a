"""Multi-head latent attention: pages hold latents. Logits and ids are compared in model/test_families.py."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from components.wire.sampling import SamplingParams
from engine.errors import UnsupportedModel
from engine.model import support
from engine.ports import EngineRequest
from tests.engine.lora.lora_files import save_adapter
from tests.engine.mock_engine import make_mock
from tests.engine.model.families import FAMILIES, OF_LATENTS, save_model
from tests.engine.tiny_engine import greedy, load_tiny, make_engine, prompt, read_page, run

LATENT_SIZE = 32 + 16
SEEDED = SamplingParams(max_tokens=20, temperature=1.0, seed=11)


@pytest.fixture(params=OF_LATENTS)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_model(tmp_path / request.param, FAMILIES[request.param]())


def test_a_page_holds_one_latent_per_token_and_layer(directory: Path) -> None:
    """Expanded, a token would have the keys and values of all four heads."""
    loaded = load_tiny(directory)
    assert (loaded.layout.kv_heads, loaded.layout.head_dim, loaded.query_group) == (1, LATENT_SIZE, 4)
    assert not [name for name, _ in loaded.module.named_parameters() if "kv_b_proj" in name]
    engine = make_engine(loaded)
    run(engine, [EngineRequest("r", prompt(40), greedy(4))])
    page = torch.frombuffer(bytearray(read_page(engine, 0)), dtype=torch.float32)
    keys, values = page.view(loaded.layout.layers, 2, 16, LATENT_SIZE).unbind(1)
    assert torch.equal(keys, values)
    assert keys.any()


def test_the_mock_has_pages_of_the_same_shape(directory: Path, tmp_path: Path) -> None:
    none = {"kv_heads": None, "head_dim": None, "layers": None}
    layout = make_mock(tmp_path, none, model=f"mock:{directory}").kv_region.layout
    real = load_tiny(directory).layout
    assert (layout.kv_heads, layout.head_dim, layout.layers) == (real.kv_heads, real.head_dim, real.layers)


def test_adapters_of_the_absorbed_matrix_are_refused(directory: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", directory, 1, targets=("kv_b_proj",))
    with pytest.raises(UnsupportedModel, match="kv_b_proj"):
        load_tiny(directory, lora={"own": str(adapter)})


def test_adapters_of_other_layers_work(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "m", FAMILIES["deepseek-v3"]())
    adapter = save_adapter(tmp_path / "adapter", directory, 1, targets=("kv_a_proj_with_mqa", "o_proj"))
    engine = make_engine(load_tiny(directory, lora={"own": str(adapter)}))
    asked = [EngineRequest(name or "plain", prompt(40), SEEDED, adapter=name) for name in ("", "own")]
    seen = run(engine, asked)
    assert seen.tokens["plain"] != seen.tokens["own"]


def test_a_transformers_without_the_method_that_is_replaced_is_named(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "expands_latents", lambda _model_class: False)
    with pytest.raises(
        UnsupportedModel, match=r"transformers 5[.\d]+ cannot keep its compressed keys and values \(MLA\)"
    ):
        load_tiny(directory)


def test_layers_that_predict_several_tokens_are_not_loaded(tmp_path: Path) -> None:
    """Published checkpoints of DeepSeek V3 have one more layer than the model, for drafts."""
    directory = save_model(tmp_path / "m", FAMILIES["deepseek-v3"]())
    plain = load_tiny(directory)
    file = directory / "model.safetensors"
    weights = load_file(file)
    last = {name.replace("layers.1.", "layers.2."): weight for name, weight in weights.items() if "layers.1." in name}
    extra = {"model.layers.2.eh_proj.weight": torch.ones(64, 128), "model.layers.2.enorm.weight": torch.ones(64)}
    save_file({**weights, **{name: weight.clone() for name, weight in last.items()}, **extra}, file, {"format": "pt"})
    asked = [EngineRequest("r", prompt(40), greedy(12))]
    assert run(make_engine(load_tiny(directory)), asked).tokens == run(make_engine(plain), asked).tokens
