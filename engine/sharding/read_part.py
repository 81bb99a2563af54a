"""Reads a rank's part of a model's weights, so that no rank needs memory for all."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from engine.attention.backend import IMPLEMENTATION
from engine.sharding.cuts import Cuts, cut_weights
from engine.sharding.part import Part

WEIGHTS: Final = "model.safetensors"  # this and the next: names in transformers
INDEX: Final = "model.safetensors.index.json"
EXPERT: Final = re.compile(r"\.experts\.(?P<expert>\d+)\.")


class CutTensor:
    """A stored tensor, of which transformers reads only a part."""

    def __init__(self, stored: Any, part: Part) -> None:
        self._stored = stored  # returned by `safe_open(...).get_slice`
        self._part = part

    def __getitem__(self, _index: Any) -> torch.Tensor:
        return self._part.of(self._stored)

    def get_dtype(self) -> Any:
        return self._stored.get_dtype()


def read_part(  # noqa: PLR0917 - first the source, then the options
    directory: Path,
    skeleton: Any,
    dtype: torch.dtype,
    cuts: Cuts,
    rank: int,
    unpack: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> tuple[Any, dict[str, Any]]:
    """Make a model from the rank's part of the weights, or from all if there are no cuts.

    Args:
        skeleton: the whole model without memory.
        unpack: converts tensors in files to the model's.
    Returns: the same as `from_pretrained(output_loading_info=True)`.
    """
    whole: Any = type(skeleton)

    def make_part(self: Any, *args: Any, **kwargs: Any) -> None:
        whole.__init__(self, *args, **kwargs)
        cut_weights(self, cuts, rank)

    # transformers constructs the class on the meta device, then fills it from `state_dict`
    part: Any = type(whole.__name__, (whole,), {"__init__": make_part, "__module__": whole.__module__})
    with ExitStack() as files:
        tensors: dict[str, Any] = {}
        for path in weight_files(directory):
            file = files.enter_context(safe_open(path, framework="pt"))
            tensors |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  no iterable
        module, report = part.from_pretrained(
            None,
            config=skeleton.config,
            state_dict=_parts(unpack(tensors), skeleton, cuts, rank),
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            ignore_mismatched_sizes=True,  # the caller refuses them
            output_loading_info=True,
        )
    return module, report


def _parts(tensors: Mapping[str, Any], skeleton: Any, cuts: Cuts, rank: int) -> dict[str, Any]:
    conversions = get_model_conversion_mapping(skeleton)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    parameters = skeleton.state_dict()
    found: dict[str, Any] = {}
    for key, stored in tensors.items():
        # files may have other names, and a tensor for each expert
        name, _ = rename_source_key(key, renamings, converters, skeleton.base_model_prefix, parameters)
        whole = parameters.get(name)
        if whole is None:
            found[key] = stored  # transformers reports or ignores it
        elif (reading := _reading(key, stored, whole, name, cuts, rank)) is not None:
            found[key] = reading
    return found


def _reading(  # noqa: PLR0917 - what is in the file, then in the model
    key: str, stored: Any, whole: torch.Tensor, name: str, cuts: Cuts, rank: int
) -> Any:
    """Return `stored` or the rank's part of it; None if it has none."""
    layer, _, kind = name.rpartition(".")
    shape = stored.get_shape()
    if name in cuts.sinks:
        part: Part | None = cuts.sinks[name]
    elif (linear := cuts.linears.get(layer)) is not None:
        part = linear.weight if kind == "weight" else linear.bias(rank)
    elif (experts := cuts.experts.get(layer)) is not None and kind in experts.parts:
        number = EXPERT.search(key) if len(shape) < whole.ndim else None
        if number is not None and experts.owned is not None:
            # transformers joins those experts that it receives
            return stored if int(number["expert"]) in experts.owned else None
        part = experts.parts[kind]
    else:
        return stored
    return None if part is None else CutTensor(stored, part.fitted(key, shape, whole.ndim))


def weight_files(directory: Path) -> list[Path]:
    """Return the files that transformers would read, because a directory may also have the weights in other formats."""
    index = directory / INDEX
    if not index.is_file():
        return [directory / WEIGHTS]
    return [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
