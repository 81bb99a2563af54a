import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BartConfig,
    BloomConfig,
    DeepseekV32Config,
    DiffLlamaConfig,
    FalconConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    JambaConfig,
    Llama4TextConfig,
    MambaConfig,
    Phi3Config,
    PhimoeConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2VLConfig,
    T5Config,
)

from components.startup import CannotServe, WrongSettings
from engine.attention.backend import attend_paged
from engine.build import prepare_model
from engine.errors import ModelUnavailable, UnsupportedModel
from engine.model.load import LoadedModel, _moved, load_model
from engine.model.progress import silent
from engine.ports import EngineRequest
from tests.engine.model.families import FAMILIES, WINDOW, reference, reference_greedy, save_model
from tests.engine.tiny_engine import EOS, greedy, load_tiny, make_engine, prompt, run, save_tiny, small, tiny_config

REPO = Path(__file__).resolve().parents[3]
ATTENTION = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}


def load(model: Path, **changes: object) -> LoadedModel:
    return load_model(str(model), small(**changes), Path("unused"), silent)


def write_config(directory: Path, config: PretrainedConfig) -> Path:
    config.save_pretrained(directory)
    return directory / "config.json"


def weights_digest(loaded: LoadedModel) -> str:
    digest = hashlib.sha256()
    for name, parameter in loaded.module.state_dict().items():
        digest.update(name.encode() + parameter.numpy().tobytes())
    return digest.hexdigest()


def test_the_facts_of_a_model_are_read_from_its_configuration(tiny: LoadedModel) -> None:
    assert (tiny.layout.layers, tiny.layout.kv_heads, tiny.layout.head_dim, tiny.query_group) == (2, 2, 16, 2)
    assert (tiny.vocab_size, tiny.max_positions, tiny.eos_token_ids) == (128, 512, frozenset({EOS}))
    assert tiny.layout.dtype == "float32"


def test_the_dtype_is_bfloat16_unless_said_otherwise(tiny_dir: Path) -> None:
    loaded = load(tiny_dir, dtype="auto")
    assert loaded.layout.dtype == "bfloat16"
    assert {p.dtype for p in loaded.module.parameters()} == {torch.bfloat16}
    assert len(run(make_engine(loaded), [EngineRequest("r", prompt(40), greedy(5, ignore_eos=True))]).tokens["r"]) == 5


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_from_a_configuration_are_the_same_every_time(tmp_path: Path, family: str) -> None:
    path = write_config(tmp_path, FAMILIES[family]())
    before = torch.random.get_rng_state()
    first, second = load(path), load(tmp_path, load_format="dummy")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first.layout == second.layout
    answers = [run(make_engine(x), [EngineRequest("r", prompt(30), greedy(12))]).tokens for x in (first, second)]
    assert answers[0] == answers[1]


def test_random_weights_are_the_same_in_every_process(tmp_path: Path) -> None:
    paths = [write_config(tmp_path / family, config()) for family, config in FAMILIES.items()]
    here = [weights_digest(load(path)) for path in paths]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO), *sys.path])}
    done = subprocess.run(
        [sys.executable, __file__, *map(str, paths)], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == here
    assert len(set(here)) > 8, "of sixteen, some differ in their windows alone"


def test_weights_have_an_identity_that_follows_them_and_not_their_place(tmp_path: Path, tiny: LoadedModel) -> None:
    same = load(save_tiny(tmp_path / "copy" / "tiny-llama"))
    other = load(save_tiny(tmp_path / "other" / "tiny-llama", seed=1))
    assert same.layout == tiny.layout
    assert other.layout.model.startswith("tiny-llama@")
    assert other.layout.model != tiny.layout.model
    assert load(tmp_path / "copy" / "tiny-llama", load_format="dummy").layout.model not in {
        same.layout.model,
        other.layout.model,
    }


def test_several_end_tokens_are_read_from_the_generation_configuration(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path / "m")
    (directory / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert load_tiny(directory).eos_token_ids == {3, 4}
    (directory / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6}')
    assert load_tiny(directory).eos_token_ids == {EOS}, "every answer ran to max_tokens"
    (directory / "generation_config.json").unlink()
    assert load_tiny(directory).eos_token_ids == {EOS}


def test_end_tokens_outside_the_vocabulary_are_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With min_tokens they forbade a token of the next request in the batch, or ended the engine."""
    directory = save_tiny(tmp_path / "m")
    (directory / "generation_config.json").write_text('{"eos_token_id": [-1, 3, 128]}')
    assert load_tiny(directory).eos_token_ids == {3}
    [warned] = [record for record in caplog.records if "end tokens" in record.message]
    assert vars(warned)["ids"] == [-1, 128]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (T5Config(d_model=64, num_layers=2, num_heads=4, vocab_size=128), "no text generation for t5"),
        (BartConfig(d_model=64, vocab_size=128), "not a decoder-only model"),
        (MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=128), "linear_attention"),
        (JambaConfig(**SIZES), "linear_attention"),
        (BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=128), "under the usual names"),
        (FalconConfig(**ATTENTION, alibi=True), "no exchangeable attention"),
        (DeepseekV32Config(**SIZES), "indexed_attention"),
        (Llama4TextConfig(**SIZES, head_dim=16), "chunked_attention"),
        (Gemma3TextConfig(**SIZES, head_dim=16, use_bidirectional_attention=True), "neither causal nor"),
        (Gemma4TextConfig(**SIZES, head_dim=16, global_head_dim=32), "per-layer attribute"),
        (DiffLlamaConfig(**SIZES), r"those that use it are \[0, 0, 1, 1\]"),
        (PhimoeConfig(**SIZES, sliding_window=32, num_local_experts=4), "asks for a window of None, and masks 32"),
        (Qwen2VLConfig(text_config=SIZES), "no text generation for qwen2_vl"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PretrainedConfig) else "",
)
def test_what_cannot_be_computed_right_is_refused_by_name(tmp_path: Path, config: PretrainedConfig, said: str) -> None:
    path = write_config(tmp_path / "odd-model", config)
    with pytest.raises(
        UnsupportedModel, match=f"odd-model.* (is not supported|does not run on paged attention): .*{said}"
    ):
        make_engine(load(path))


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors", "bitsandbytes", "mxfp4", ""])
def test_quantised_weights_are_refused_by_their_method_before_they_are_read(tmp_path: Path, method: str) -> None:
    """transformers then raised an import error, or loaded weights that cannot be multiplied."""
    path = save_tiny(tmp_path / "odd-model")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4} if method else {"bits": 4}
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(
        UnsupportedModel, match=rf"odd-model is not supported: .*quantised \({method}.*unquantised .*GGUF"
    ):
        load_tiny(path)


def test_a_window_that_only_the_configuration_knows_is_refused(tmp_path: Path) -> None:
    """The model masks by its configuration, and its layers ask for what they were made with."""
    loaded = load(write_config(tmp_path, FAMILIES["gemma3"]()))
    loaded.module.config.sliding_window = 50
    with pytest.raises(UnsupportedModel, match=f"asks for a window of {WINDOW}, and masks 50"):
        make_engine(loaded)


@pytest.mark.parametrize("asked", [{"is_causal": False}, {"something_new": 1}])
def test_what_attention_is_told_and_does_not_know_is_refused(asked: dict[str, object]) -> None:
    heads = torch.zeros(1, 4, 1, 16)
    with pytest.raises(UnsupportedModel, match=f"Linear asks attention for {next(iter(asked))}"):
        attend_paged(torch.nn.Linear(1, 1), heads, heads, heads, None, scaling=1.0, step_attention=None, **asked)


def test_contexts_end_where_one_long_request_would_change_the_frequencies_of_all(tmp_path: Path) -> None:
    """Phi-3's longer models have two sets of frequencies, of which transformers uses one for the whole batch."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope |= {"rope_theta": 10000.0, "original_max_position_embeddings": 64}
    loaded = load(
        save_model(tmp_path, Phi3Config(**SIZES, **IDS, original_max_position_embeddings=64, rope_parameters=rope))
    )
    assert loaded.max_positions == 64
    model = reference(tmp_path)
    requests = [EngineRequest(f"r{length}", prompt(length), greedy(8)) for length in (10, 50)]
    seen = run(make_engine(loaded), requests)
    assert seen.tokens == {r.request_id: reference_greedy(model, r.token_ids, 8) for r in requests}


def test_weights_that_lack_a_tensor_are_refused(tmp_path: Path) -> None:
    """transformers would fill it with random values."""
    directory = save_tiny(tmp_path)
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelUnavailable, match=r"lack 1 tensors, among them model.layers.1.mlp.up_proj.weight"):
        load(directory)


def test_weights_that_are_truncated_are_refused(tmp_path: Path) -> None:
    file = save_tiny(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelUnavailable, match=f"the weights in {tmp_path} cannot be read"):
        load(tmp_path)


def change_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantised_weights_are_refused_if_config_json_does_not_mention_it(tmp_path: Path, dtype: torch.dtype) -> None:
    """They were read as plain weights, without their scales."""

    def quantise(weights: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        weights[name] = (weights[name] * 50).to(dtype)
        weights[f"{name}_scale"] = torch.tensor([0.02])

    change_weights(save_tiny(tmp_path / "m"), quantise)
    with pytest.raises(
        UnsupportedModel, match=r"m is not supported: its weights are quantised \(model.layers.0.mlp.up_"
    ):
        load_tiny(tmp_path / "m")


@pytest.mark.parametrize("size", [1, 2])
def test_tensors_of_a_layer_that_has_no_place_for_them_are_refused(tmp_path: Path, size: int) -> None:
    """Biases that config.json did not mention were ignored."""

    def add(weights: dict[str, torch.Tensor]) -> None:
        for layer in (0, 1):
            weights[f"model.layers.{layer}.self_attn.q_proj.bias"] = torch.ones(64)

    change_weights(save_tiny(tmp_path), add)
    with pytest.raises(UnsupportedModel, match=r"hold model.layers.0.self_attn.q_proj.bias, .* and 1 more"):
        load_tiny(tmp_path, tensor_parallel=size)


def test_tensors_of_parts_that_are_not_computed_are_left_out(tmp_path: Path) -> None:
    def add(weights: dict[str, torch.Tensor]) -> None:
        weights["vision_tower.layers.0.q_proj.bias"] = torch.ones(4)
        weights["model.layers.2.mlp.up_proj.weight"] = torch.ones(4, 4)  # a further layer predicts more tokens
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        weights["model.rotary_emb.inv_freq"] = torch.ones(8)
        weights["model.layers.0.self_attn.bias"] = torch.ones(4, 4, dtype=torch.uint8)  # a mask of older files

    change_weights(save_tiny(tmp_path), add)
    assert load_tiny(tmp_path).vocab_size == 128


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "run `git lfs pull`"),
        (b"", "not a safetensors file, or truncated"),
        (b"abc", "not a safetensors file, or truncated"),
        (b"\xff" * 100, "not a safetensors file, or truncated"),
        (b"\x03" + b"\0" * 7 + b"abc", "not a safetensors file"),
    ],
    ids=["pointer", "empty", "short", "long header", "no JSON"],
)
def test_a_damaged_file_of_weights_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    """A Git LFS pointer gave the traceback of a MemoryError, an empty file of a struct.error."""
    path = save_tiny(tmp_path) / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelUnavailable, match=f"{path} is .*{said}"):
        load_tiny(tmp_path)


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"weight_map": 1}'])
def test_a_damaged_index_of_weights_is_named(tmp_path: Path, content: str) -> None:
    (save_tiny(tmp_path) / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelUnavailable, match=r"model.safetensors.index.json cannot be read"):
        load_tiny(tmp_path)


def test_weights_of_other_shapes_than_the_configuration_are_refused(tmp_path: Path) -> None:
    path = save_tiny(tmp_path) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 130}))
    with pytest.raises(
        ModelUnavailable, match=r"do not fit .* lm_head.weight is \(128, 64\), which should be \(130, 64\)"
    ):
        load_tiny(tmp_path)


@pytest.mark.parametrize("content", ['{"eos_token_id": 5,', '{"eos_token_id": ["</s>"]}', '{"eos_token_id": "</s>"}'])
def test_a_damaged_generation_configuration_is_named(tmp_path: Path, content: str) -> None:
    (save_tiny(tmp_path) / "generation_config.json").write_text(content)
    with pytest.raises(
        ModelUnavailable, match=r"generation_config.json is not the JSON of a model|eos_token_id of the model in"
    ):
        load_tiny(tmp_path)


@pytest.mark.parametrize("end", ["<end>", {"content": "<end>", "special": True}])
def test_the_tokenizers_end_of_text_is_an_end_token(tmp_path: Path, end: object) -> None:
    """If other files named another one, answers continued after it."""
    directory = save_tiny(tmp_path)
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    added = [{"id": 8, "content": "<start>"}, {"id": 9, "content": "<end>"}]
    (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert load_tiny(directory).eos_token_ids == {EOS, 9}


def test_a_model_whose_attention_goes_elsewhere_is_refused(tmp_path: Path) -> None:
    """transformers keeps the choice of attention in the configuration, which other code may change."""
    loaded = load(write_config(tmp_path, Qwen2Config(**SIZES)))
    loaded.module.config._attn_implementation = "sdpa"
    with pytest.raises(UnsupportedModel, match="does not run on paged attention"):
        make_engine(loaded)


def test_a_directory_without_weights_is_answered_with_the_way_to_random_ones(tmp_path: Path) -> None:
    write_config(tmp_path, tiny_config())
    with pytest.raises(ModelUnavailable, match="load_format=dummy"):
        load(tmp_path)


def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A supervisor showed only the last line: how to update Transformers."""
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ModelUnavailable, match=r"cannot be read: .*no-such-model[^\n]*$"):
        load(tmp_path)


def change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "changes", [{"hidden_act": "newer"}, {"num_key_value_heads": 0}, {"head_dim": "wide"}], ids=str
)
def test_what_transformers_cannot_build_is_one_line(tmp_path: Path, changes: dict[str, object], ranks: int) -> None:
    """The worker ended with a traceback, and was restarted."""
    change_json(save_tiny(tmp_path) / "config.json", **changes)
    with pytest.raises(ModelUnavailable) as caught:
        load_tiny(tmp_path, tensor_parallel=ranks)
    assert str(tmp_path) in caught.value.message
    assert "\n" not in caught.value.message


def test_weights_behind_a_dangling_link_are_named(tmp_path: Path) -> None:
    file = save_tiny(tmp_path) / "model.safetensors"
    file.unlink()
    file.symlink_to(tmp_path / "blobs" / "gone")
    with pytest.raises(ModelUnavailable, match=r"model\.safetensors cannot be read"):
        load_tiny(tmp_path)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
def test_a_file_with_another_kind_of_json_is_named(tmp_path: Path, name: str) -> None:
    directory = save_tiny(tmp_path)
    (directory / "tokenizer.json").write_text('{"added_tokens": [{"id": 3}]}')
    (directory / name).write_text("[1]")
    with pytest.raises(ModelUnavailable, match=rf"{name} is not the JSON of a model|cannot build .* from the files in"):
        load_tiny(tmp_path)


if __name__ == "__main__":
    sys.stdout.write("\n".join(weights_digest(load(Path(path))) for path in sys.argv[1:]))


@pytest.mark.parametrize(("total", "kind"), [(500, CannotServe), (400, WrongSettings)])
def test_weights_that_would_fit_on_the_device_alone_may_fit_later(
    total: int, kind: type[CannotServe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes' memory counted as wrong settings."""

    class Module(torch.nn.Linear):
        def to(self, *_args: object) -> "Module":
            raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, total))
    with pytest.raises(CannotServe, match="the weights take") as raised:
        _moved(Module(20, 5), torch.device("cuda"))
    assert type(raised.value) is kind


def test_a_start_logs_what_it_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A worker was silent for 20 s, since quick loading reports no progress."""
    with caplog.at_level(logging.INFO, "engine.build"):
        prepare_model(str(save_tiny(tmp_path)), small(), tmp_path)
    assert caplog.messages[:2] == ["loading weights", "warming up"]
