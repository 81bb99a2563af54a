"""The end tokens that a model's files name, without torch."""

from pathlib import Path
from typing import Any, Final

from engine.errors import ModelUnavailable
from engine.model.model_files import CONFIG_FILE, read_json

GENERATION_FILE: Final = "generation_config.json"


def named_end(directory: Path, configured: Any) -> list[int]:
    """Return the end tokens of generation_config.json, or else `configured`, and the tokenizer's, as in vLLM.

    Args:
        configured: `eos_token_id` of the model's configuration.
    Raises: ModelUnavailable.
    """
    path = directory / GENERATION_FILE
    found = read_json(path).get("eos_token_id") if path.is_file() else None
    named = configured if found is None else found
    ids = [] if named is None else named if isinstance(named, list) else [named]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise ModelUnavailable(
            f"eos_token_id of the model in {directory} is {named!r}; it must be an id, or a list of ids"
        )
    return [*ids, *_tokenizer_end(directory)]


def read_end_tokens(directory: Path) -> frozenset[int]:
    """Read them even if the engine cannot load the model. Raises: ModelUnavailable."""
    path = directory / CONFIG_FILE
    config = read_json(path) if path.is_file() else {}
    return frozenset(named_end(directory, config.get("text_config", config).get("eos_token_id")))


def _tokenizer_end(directory: Path) -> list[int]:
    settings, tokens = directory / "tokenizer_config.json", directory / "tokenizer.json"
    if not settings.is_file() or not tokens.is_file():
        return []
    end = read_json(settings).get("eos_token")
    text = end.get("content") if isinstance(end, dict) else end
    return [added["id"] for added in read_json(tokens).get("added_tokens") or () if added.get("content") == text]
