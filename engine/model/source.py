"""A model's files, and the modules that transformers builds from them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig

from engine.attention.backend import IMPLEMENTATION
from engine.errors import ModelUnavailable
from engine.model.loading_bars import reported_bars
from engine.model.progress import Progress
from engine.model.quantised import Unpack
from engine.model.support import check_stored, check_unexpected
from engine.sharding.cuts import Cuts
from engine.sharding.read_part import INDEX, read_part, weight_files

RANDOM_SEED: Final = 0


def read_config(directory: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(directory)
    except (OSError, ValueError, KeyError, StrictDataclassError) as exc:
        cause = " ".join(str(exc).partition("\n\n")[0].split())  # the rest explains how to update transformers
        raise ModelUnavailable(f"the configuration in {directory} cannot be read: {cause}") from exc


@dataclass(frozen=True, slots=True)
class ModelSource:
    name: str
    directory: Path
    config: Any
    auto: Any  # AutoModelForCausalLM or AutoModel
    dtype: torch.dtype
    unpack: Unpack | None

    def skeleton(self) -> Any:
        """Return the whole model without memory for its weights."""
        with self._building(), torch.device("meta"):
            return self.auto.from_config(self.config, attn_implementation=IMPLEMENTATION)

    def random(self, device: torch.device) -> Any:
        """Create the same random weights in every process. The caller's random state does not change."""
        forked = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        with self._building(), forked, device:
            torch.manual_seed(RANDOM_SEED)
            return self.auto.from_config(self.config, dtype=self.dtype, attn_implementation=IMPLEMENTATION)

    def trained(self, skeleton: Any, cuts: Cuts, rank: int, progress: Progress) -> Any:
        """Load trained weights on the CPU: the rank's part, or all if there is no `skeleton`.

        Raises: ModelUnavailable, UnsupportedModel.
        """
        self._check_files()
        try:
            with reported_bars("Loading weights", progress), self._building():
                if skeleton is None:
                    module, report = self._read_whole()
                else:
                    module, report = read_part(self.directory, skeleton, self.dtype, cuts, rank, self.unpack or dict)
        except (OSError, SafetensorError) as exc:
            raise ModelUnavailable(f"the weights in {self.directory} cannot be read: {exc}") from exc
        if wrong := sorted(report["mismatched_keys"]):
            tensor, stored, wanted = wrong[0]
            raise ModelUnavailable(
                f"the weights in {self.directory} do not fit its config.json: {tensor} is {tuple(stored)}, which should be "
                f"{tuple(wanted)}"
            )
        if missing := sorted(report["missing_keys"]):  # transformers would initialise them at random
            raise ModelUnavailable(
                f"the weights in {self.directory} lack {len(missing)} tensors, among them {missing[0]}"
            )
        check_unexpected(self.name, module, report["unexpected_keys"])
        return module

    def _check_files(self) -> None:
        if not any(self.directory.glob("*.safetensors")):
            raise ModelUnavailable(f"{self.directory} has no *.safetensors; for random weights use load_format=dummy")
        try:
            files = weight_files(self.directory)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
            raise ModelUnavailable(f"{self.directory / INDEX} cannot be read: {exc}") from exc
        check_stored(self.name, [path for path in files if path.is_file()], self.unpack is not None)

    def _read_whole(self) -> Any:
        return self.auto.from_pretrained(
            self.directory,
            dtype=self.dtype,
            attn_implementation=IMPLEMENTATION,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # `trained` refuses them
            output_loading_info=True,
        )

    @contextmanager
    def _building(self) -> Iterator[None]:
        """Turn transformers' errors while it builds the model into ModelUnavailable."""
        try:
            yield
        except (KeyError, TypeError, AttributeError, ZeroDivisionError) as exc:
            raise ModelUnavailable(
                f"transformers {transformers.__version__} cannot build {self.name} from the files in {self.directory} "
                f"({type(exc).__name__}: {exc}). Check them, or install the version of transformers that the model needs"
            ) from exc
