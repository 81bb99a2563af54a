"""Models from the Hugging Face hub. Importing its package takes 0.25 s."""

from pathlib import Path
from typing import Any, Final

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from engine.errors import ModelUnavailable
from engine.model.progress import Progress

FILES: Final = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
OTHERS: Final = ["original/*", "consolidated*.safetensors"]  # not fetched: the same weights in other formats


def fetch(model: str, progress: Progress) -> Path:
    """Return the snapshot's directory, from the local cache if nothing has changed. Raises: ModelUnavailable."""

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # an argument of the hub's own bar
            super().__init__(*args, **{**kwargs, "disable": False, "file": _NullFile()})

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            progress(f"Fetching {model}", int(self.n), int(self.total or 0))
            return shown

    try:
        return Path(snapshot_download(model, allow_patterns=FILES, ignore_patterns=OTHERS, tqdm_class=Bar))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as exc:
        raise ModelUnavailable(f"{model} could not be fetched from the hub: {_cause(exc)}") from exc


def _cause(exc: Exception) -> str:
    """Return cause and remedy in one line, because a supervisor shows only a message's last line."""
    if isinstance(exc, LocalEntryNotFoundError):
        return "no connection, or no such model. Check both, or give a local directory"
    if isinstance(exc, HFValidationError):
        return "this is not a valid hub id. Check the name, or give a local directory"
    if isinstance(exc, RepositoryNotFoundError):
        return "no such model, or one that requires a login. Check the name, or set HF_TOKEN"
    return f"{' '.join(str(exc).split()) or type(exc).__name__}. Check the connection, or give a local directory"


class _NullFile:
    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass
