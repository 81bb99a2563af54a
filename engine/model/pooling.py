"""How an embedding model pools tokens into a vector, read from its directory.

sentence-transformers describes it in modules.json. Without that file, a model without an output layer
(`"architectures": ["MistralModel"]`) returns the last token's state, normalised, as in vLLM.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from components.wire.embed import EmbeddingModel
from engine.errors import ModelUnavailable, UnsupportedModel
from engine.model.model_files import CONFIG_FILE, read_json, read_size

MODULES_FILE: Final = "modules.json"
LIMIT_FILE: Final = "sentence_bert_config.json"
SWITCH: Final = "pooling_mode_"  # in older files; newer ones have `pooling_mode`
HEADLESS: Final = re.compile(r"\w+(?<!LMHead)Model")
PoolingMode = Literal["last", "mean", "cls"]
MODES: Final[dict[str, PoolingMode]] = {
    "lasttoken": "last",
    "mean": "mean",
    "mean_tokens": "mean",
    "cls": "cls",
    "cls_token": "cls",
}


@dataclass(frozen=True, slots=True)
class Pooling:
    mode: PoolingMode  # over hidden states after the last norm
    about: EmbeddingModel
    max_tokens: int | None = None  # if fewer than the model's positions

    @property
    def reads_all(self) -> bool:
        """Return whether a vector needs the hidden states of all tokens, which the prefix cache does not keep."""
        return self.mode != "last"


def read_pooling(name: str, directory: Path, *, matryoshka: bool = False) -> Pooling | None:
    """Return None if the model generates text. Raises: UnsupportedModel, ModelUnavailable."""
    config = read_json(directory / CONFIG_FILE)
    modules = directory / MODULES_FILE
    if modules.is_file():
        mode, normalised = _of_modules(name, directory, read_json(modules, list))
    elif any(HEADLESS.fullmatch(str(architecture)) for architecture in config.get("architectures") or ()):
        mode, normalised = "last", True
    else:
        return None
    file = directory / CONFIG_FILE
    sizes = config.get("matryoshka_dimensions") or []
    if not isinstance(sizes, list) or not all(isinstance(size, int) for size in sizes):
        raise ModelUnavailable(f"{file}: matryoshka_dimensions is {sizes!r}; it must be a list of integers")
    about = EmbeddingModel(
        dimensions=read_size(file, config.get("text_config", config), "hidden_size"),
        normalised=normalised,
        matryoshka=bool(matryoshka or sizes or config.get("is_matryoshka")),
        matryoshka_dimensions=sizes,
    )
    return Pooling(mode, about, _max_tokens(directory / LIMIT_FILE))


def _max_tokens(path: Path) -> int | None:
    limits = read_json(path) if path.is_file() else {}
    return None if limits.get("max_seq_length") is None else read_size(path, limits, "max_seq_length")


def _of_modules(name: str, directory: Path, modules: list[Any]) -> tuple[PoolingMode, bool]:
    if not all(isinstance(module, dict) and {"type", "path"} <= module.keys() for module in modules):
        raise ModelUnavailable(f"{directory / MODULES_FILE}: each module must have a type and a path")
    kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UnsupportedModel(
            f"{name} is not supported: its embeddings are made by {', '.join(kinds)}; "
            "computed here are Transformer, Pooling and Normalize"
        )
    options = read_json(directory / str(modules[1]["path"]) / CONFIG_FILE)
    return _mode(name, options), len(kinds) == 3


def _mode(name: str, options: dict[str, Any]) -> PoolingMode:
    named = options.get("pooling_mode")
    asked = [named] if named else [key.removeprefix(SWITCH) for key, on in options.items() if on and SWITCH in key]
    if len(asked) != 1 or asked[0] not in MODES:
        raise UnsupportedModel(
            f"{name} is not supported: it pools by {asked}; computed here are lasttoken, mean_tokens and cls_token"
        )
    return MODES[str(asked[0])]
