"""Where a model's tokenizer is, without the libraries that read it."""

from pathlib import Path
from typing import Final

from components.startup import WrongSettings

TOKENIZER_FILE: Final = "tokenizer.json"


def check_tokenizer_file(directory: Path) -> None:
    """Raises: WrongSettings, if `directory` has no tokenizer."""
    if not (directory / TOKENIZER_FILE).is_file():
        raise WrongSettings(f"{directory} has no {TOKENIZER_FILE}: copy the one of the model beside config.json")
