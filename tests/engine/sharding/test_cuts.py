"""What a rank reads of a model: each weight once over all ranks, KV heads where they are needed, nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, MixtralConfig

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


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_sinks_go_with_their_heads_and_experts_stay_whole(tmp_path: Path, load_format: str) -> None:
    directory = save_model(tmp_path / "model", FAMILIES["gpt-oss"]())
    whole = dict(load_tiny(directory, load_format=load_format).module.named_parameters())
    parts = [parameters(directory, 2, rank, load_format=load_format) for rank in range(2)]
    for name, weight in whole.items():
        leaf, layer = name.split(".")[-1], name.split(".")[-2]
        found = [part[name] for part in parts if name in part]
        if leaf == "sinks" or layer in ("q_proj", "k_proj", "v_proj"):
            assert torch.equal(torch.cat(found), weight)
        elif layer == "o_proj" and leaf == "weight":
            assert torch.equal(torch.cat(found, dim=1), weight)
        else:
            assert len(found) == (1 if layer in ("o_proj", "lm_head") else 2), "the leader's alone"
            assert all(torch.equal(part, weight) for part in found)


def test_a_rank_takes_only_its_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save_tiny(tmp_path / "tiny")
    read: list[int] = []

    class Counted(read_part.CutTensor):
        def __getitem__(self, index: Any) -> torch.Tensor:
            part = super().__getitem__(index)
            assert part.is_contiguous()
            read.append(part.nbytes)
            return part

    monkeypatch.setattr(read_part, "CutTensor", Counted)
    loaded = load_model(str(directory), small(tensor_parallel=2), Path("unused"), silent, 1)
    cut = [weight for name, weight in loaded.module.named_parameters() if "_proj" in name]
    assert len(cut) == 14
    assert sorted(read) == sorted(weight.nbytes for weight in cut)


REFUSED: dict[str, tuple[Any, int, str]] = {
    "experts": (
        MixtralConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=128,
            num_local_experts=2,
        ),
        2,
        "only linear layers are cut",
    ),
    "no plan": (GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=128), 2, "transformers has no plan to cut"),
}


@pytest.mark.parametrize(("config", "size", "why"), REFUSED.values(), ids=REFUSED)
def test_a_plan_that_cuts_anything_else_is_refused(tmp_path: Path, config: Any, size: int, why: str) -> None:
    directory = tmp_path / "model"
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    with pytest.raises(UnsupportedModel, match=f"tensor_parallel={size}: .*{why}"):
        load_model(str(directory), small(tensor_parallel=size), Path("unused"), silent)


@pytest.mark.parametrize(
    ("changes", "size", "why"),
    [
        ({}, 3, "4 query heads and 2 KV heads; it can be cut into 1, 2, 4"),
        ({"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6}, 4, "it can be cut into 1, 2, 3, 6"),
        ({"intermediate_size": 97}, 2, "gate_proj has 97"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(tmp_path: Path, changes: dict[str, int], size: int, why: str) -> None:
    directory = save_tiny(tmp_path / "tiny", **changes)
    with pytest.raises(UnsupportedModel, match=why):
        load_model(str(directory), small(tensor_parallel=size), Path("unused"), silent)
