"""Read a rank's part of a model's weights: no rank holds the whole."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from transformers.models.auto.auto_factory import _get_model_class

from engine.attention.backend import IMPLEMENTATION
from engine.sharding.cuts import Cut, Cuts, cut_weights

WEIGHTS: Final = "model.safetensors"  # transformers' names
INDEX: Final = "model.safetensors.index.json"


class CutTensor:
    """A tensor in a file. Reading it, as transformers does by `[...]`, reads one part."""

    def __init__(self, stored: Any, part: tuple[slice, ...]) -> None:
        self._stored = stored  # of `safe_open(...).get_slice`
        self._part = part

    def __getitem__(self, _index: Any) -> torch.Tensor:
        part: torch.Tensor = self._stored[self._part]
        return part.contiguous()  # columns of a mapped file would keep the whole in memory

    def get_dtype(self) -> Any:
        return self._stored.get_dtype()


def read_part(  # noqa: PLR0917 - what to read, then which part
    auto: Any, directory: Path, model_config: Any, dtype: torch.dtype, cuts: Cuts, rank: int
) -> tuple[Any, dict[str, Any]]:
    """Make a model from its part of the weights.

    Returns: as `from_pretrained(output_loading_info=True)`.
    """
    whole: Any = _get_model_class(model_config, auto._model_mapping)

    def make_part(self: Any, *args: Any, **kwargs: Any) -> None:
        whole.__init__(self, *args, **kwargs)
        cut_weights(self, cuts, rank)

    # transformers makes the class on the meta device, then fills its parameters from `state_dict`
    part: Any = type(whole.__name__, (whole,), {"__init__": make_part, "__module__": whole.__module__})
    with ExitStack() as files:
        tensors: dict[str, Any] = {}
        for path in weight_files(directory):
            file = files.enter_context(safe_open(path, framework="pt"))
            tensors |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  no iterable
        tensors = _parts(tensors, cuts, f"{whole.base_model_prefix}.", rank)
        module, report = part.from_pretrained(
            None,
            config=model_config,
            state_dict=tensors,
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            output_loading_info=True,
        )
    return module, report


def _parts(tensors: dict[str, Any], cuts: Cuts, prefix: str, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, stored in tensors.items():
        layer, _, kind = key.rpartition(".")
        cut = _cut_of(key, cuts, prefix) or _cut_of(layer, cuts, prefix)
        if cut is None:
            found[key] = stored
        elif (index := cut.bias(rank) if kind == "bias" else cut.weight) is not None:
            found[key] = CutTensor(stored, index)
    return found


def _cut_of(name: str, cuts: Cuts, prefix: str) -> Cut | None:
    """A file of a base model has names without the prefix."""
    return next((cuts[each] for each in (name, prefix + name, name.removeprefix(prefix)) if each in cuts), None)


def weight_files(directory: Path) -> list[Path]:
    """The files that transformers would read: a directory may have the weights in other formats, too."""
    index = directory / INDEX
    if not index.is_file():
        return [directory / WEIGHTS]
    return [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
