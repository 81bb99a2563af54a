"""Whether a model makes embeddings, and how a text's vector comes from its tokens: what its directory says, without torch.

A directory as sentence-transformers saves it says so in modules.json. One without is an embedding model when its weights
have no output layer (`"architectures": ["MistralModel"]`): then it is the last token's state, normalised, as in vLLM.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from components.wire.embedding_model import EmbeddingModel
from engine.model.errors import ModelUnavailable, UnsupportedModel
from engine.model.identity import CONFIG_FILE

MODULES_FILE: Final = "modules.json"
LIMIT_FILE: Final = "sentence_bert_config.json"
SWITCH: Final = "pooling_mode_"  # in older files each way has one; newer ones name the way in `pooling_mode`
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
    """How a text becomes a vector."""

    mode: PoolingMode  # of the hidden states behind the last layer's norm: the last token's, their mean, the first's
    about: EmbeddingModel
    max_tokens: int | None = None  # of a text, where its authors let in less than its positions

    @property
    def reads_all(self) -> bool:
        """Whether every token's state counts: then none may come from the prefix cache, which has none."""
        return self.mode != "last"


def read_pooling(name: str, directory: Path, *, matryoshka: bool = False) -> Pooling | None:
    """None: the model in `directory` generates. `matryoshka`: its vectors may be cut, though config.json does not say so.

    Raises: UnsupportedModel, naming what it would need that is not computed here; ModelUnavailable.
    """
    config = _read(directory / CONFIG_FILE)
    modules = directory / MODULES_FILE
    if modules.is_file():
        mode, normalised = _of_modules(name, directory, _read(modules))
    elif any(HEADLESS.fullmatch(str(architecture)) for architecture in config.get("architectures") or ()):
        mode, normalised = "last", True
    else:
        return None
    limit = _read(directory / LIMIT_FILE).get("max_seq_length") if (directory / LIMIT_FILE).is_file() else None
    sizes = config.get("matryoshka_dimensions") or []
    text = config.get("text_config", config)
    about = EmbeddingModel(
        dimensions=int(text["hidden_size"]),
        normalised=normalised,
        matryoshka=bool(matryoshka or sizes or config.get("is_matryoshka")),
        matryoshka_dimensions=[int(size) for size in sizes],
    )
    return Pooling(mode, about, limit)


def _of_modules(name: str, directory: Path, modules: list[dict[str, Any]]) -> tuple[PoolingMode, bool]:
    """By a list of modules: the transformer itself, pooling, and maybe a normalisation."""
    kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UnsupportedModel(
            f"{name} is not supported: its embeddings are made by {', '.join(kinds)}; "
            "computed here are Transformer, Pooling and Normalize"
        )
    options = _read(directory / str(modules[1]["path"]) / CONFIG_FILE)
    return _mode(name, options), len(kinds) == 3


def _mode(name: str, options: dict[str, Any]) -> PoolingMode:
    named = options.get("pooling_mode")
    asked = [named] if named else [key.removeprefix(SWITCH) for key, on in options.items() if on and SWITCH in key]
    if len(asked) != 1 or asked[0] not in MODES:
        raise UnsupportedModel(
            f"{name} is not supported: it pools by {asked}; computed here are lasttoken, mean_tokens and cls_token"
        )
    return MODES[str(asked[0])]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as exc:
        raise ModelUnavailable(f"{path} cannot be read: {exc}") from exc
