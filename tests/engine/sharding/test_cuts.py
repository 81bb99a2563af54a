"""The part of a model that a rank reads: each weight once over all ranks, and its KV heads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.errors import UnsupportedModel
from engine.model.load import load_model
from engine.model.progress import silent
from engine.sharding import read_part
from tests.engine.model.families import FAMILIES, save_model
from tests.engine.tiny_engine import load_tiny, save_tiny, small


def parameters(directory: Path, size: int, rank: int, **changes: object) -> dict[str, torch.Tensor]:
    loaded = load_model(str(directory), small(tensor_parallel=size, **changes), Path("unused"), silent, rank)
    return {name.replace(".part.", "."): weight for name, weight in loaded.module.named_parameters()}


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_parts_of_all_ranks_are_the_model(tmp_path: Path, size: int, load_format: str) -> None:
    directory = save_tiny(tmp_path / "tiny")
    whole = dict(load_tiny(directory, load_format=load_format).module.named_parameters())
    parts = [parameters(directory, size, rank, load_format=load_format) for rank in range(size)]
    for name, weight in whole.items():
        layer = name.split(".")[-2]
        found = [part[name] for part in parts if name in part]
        if layer == "lm_head":
            assert [name in part for part in parts] == [True] + [False] * (size - 1), "the leader's alone"
        elif layer in ("k_proj", "v_proj") and size == 4:
            assert torch.equal(torch.cat(found[::2]), weight)
            assert torch.equal(torch.cat(found[1::2]), weight), "two ranks have the same head"
        elif layer.endswith("_proj"):
            assert torch.equal(torch.cat(found, dim=1 if layer in ("o_proj", "down_proj") else 0), weight)
        else:
            assert all(torch.equal(part, weight) for part in found)


def test_a_rank_has_whole_heads_where_the_ranks_do_not_divide_them(tmp_path: Path) -> None:
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    directory = save_tiny(tmp_path / "tiny", **sizes)
    whole = dict(load_tiny(directory).module.named_parameters())
    parts = [parameters(directory, 2, rank) for rank in range(2)]
    for leaf, dim, heads in (("q_proj", 0, (2, 4)), ("k_proj", 0, (1, 2)), ("o_proj", 1, (2, 4))):
        name = f"model.layers.0.self_attn.{leaf}.weight"
        found = [part[name] for part in parts]
        assert torch.equal(torch.cat(found, dim=dim), whole[name])
        assert [part.shape[dim] for part in found] == [16 * number for number in heads]


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_sinks_go_with_their_heads_and_experts_are_divided(tmp_path: Path, load_format: str) -> None:
    directory = save_model(tmp_path / "model", FAMILIES["gpt-oss"]())
    whole = dict(load_tiny(directory, load_format=load_format).module.named_parameters())
    parts = [parameters(directory, 2, rank, load_format=load_format) for rank in range(2)]
    for name, weight in whole.items():
        leaf, layer = name.split(".")[-1], name.split(".")[-2]
        found = [part[name] for part in parts if name in part]
        if leaf == "sinks" or layer in ("q_proj", "k_proj", "v_proj", "experts"):
            assert torch.equal(torch.cat(found), weight)
        elif layer == "o_proj" and leaf == "weight":
            assert torch.equal(torch.cat(found, dim=1), weight)
        else:
            assert len(found) == (1 if layer in ("o_proj", "lm_head") else 2), "the leader's alone"
            assert all(torch.equal(part, weight) for part in found)


class Counted:
    """`safe_open` that counts the bytes read."""

    def __init__(self, path: Path, framework: str) -> None:
        self._file: Any = safe_open(path, framework)
        self.read: dict[str, int] = {}

    def __enter__(self) -> "Counted":
        return self

    def __exit__(self, *_exc: object) -> None:
        pass

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_slice(self, key: str) -> "CountedTensor":
        return CountedTensor(self, key, self._file.get_slice(key))


class CountedTensor:
    def __init__(self, file: Counted, key: str, stored: Any) -> None:
        self._file = file
        self._key = key
        self._stored = stored
        self.get_dtype = stored.get_dtype
        self.get_shape = stored.get_shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        part: torch.Tensor = self._stored[index]
        self._file.read[self._key] = self._file.read.get(self._key, 0) + part.nbytes
        return part


@pytest.mark.parametrize("joined", [False, True], ids=["as published", "experts joined"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "qwen2-moe", "mixtral", "gpt-oss", "phi3", "glm"])
def test_a_rank_reads_its_part_of_a_file_and_nothing_else(
    tmp_path: Path, family: str, size: int, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen 2 has six experts: four ranks have a part of each."""
    directory = save_model(tmp_path / family, FAMILIES[family]())
    if joined:  # transformers saves each expert alone
        save_file(load_tiny(directory).module.state_dict(), directory / "model.safetensors", {"format": "pt"})
    files: list[Counted] = []

    def opened(path: Path, framework: str) -> Counted:
        files.append(Counted(path, framework))
        return files[-1]

    monkeypatch.setattr(read_part, "safe_open", opened)
    whole = sum(parameter.nbytes for parameter in load_tiny(directory).module.parameters())
    loaded = [load_model(str(directory), small(tensor_parallel=size), Path("x"), silent, r) for r in range(size)]
    for model, file in zip(loaded, files, strict=True):
        own = sum(parameter.nbytes for parameter in model.module.parameters())
        file.read.pop("lm_head.weight")  # which followers drop
        assert sum(file.read.values()) == own - (128 * 64 * 4 if model is loaded[0] else 0)
        assert own < whole * (0.65 if size == 2 else 0.45), "router, norms and embeddings are whole"
        assert all(parameter.is_contiguous() for parameter in model.module.parameters())


@pytest.mark.parametrize(
    ("family", "ending"),
    [("mixtral", "layers.1.self_attn.q_proj.weight"), ("qwen2-moe", "layers.1.mlp.experts.2.up_proj.weight")],
)
def test_a_file_whose_tensors_have_other_shapes_is_refused(tmp_path: Path, family: str, ending: str) -> None:
    directory = save_model(tmp_path / family, FAMILIES[family]())
    path = directory / "model.safetensors"
    save_file({**load_file(path), f"model.{ending}": torch.zeros(31, 64)}, path, {"format": "pt"})
    with pytest.raises(
        UnsupportedModel, match=rf"{ending} has the shape \[31, 64\], which cannot be divided over ranks"
    ):
        load_model(str(directory), small(tensor_parallel=4), Path("unused"), silent, 1)


@pytest.mark.parametrize(
    ("changes", "size", "why"),
    [
        ({}, 3, "4 query heads and 2 KV heads; it can be cut into 1, 2, 4"),
        ({"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}, 4, "it can be cut into 1, 2, 3, 6"),
        ({"intermediate_size": 97}, 2, "gate_proj has 97"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(tmp_path: Path, changes: dict[str, int], size: int, why: str) -> None:
    directory = save_tiny(tmp_path / "tiny", **changes)
    with pytest.raises(UnsupportedModel, match=why):
        load_model(str(directory), small(tensor_parallel=size), Path("unused"), silent)
