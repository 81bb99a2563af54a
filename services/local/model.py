"""The model, on this machine and in the form the engine loads, before any worker starts: two would convert it twice."""

from collections.abc import Sequence
from typing import Final

from services.local.output import Output
from services.local.process import CannotStart, describe_exit, run

NAME: Final = "model"


async def prepare_model(model: str, command: Sequence[str], output: Output) -> None:
    """Run `command`, which prepares `model`, and show its progress. Raises: CannotStart, with its last words."""
    last_words = ""

    def show(line: str) -> None:
        nonlocal last_words
        last_words = output.show(NAME, line) or line or last_words

    try:
        returncode = await run(command, show)
    finally:
        output.end_progress(NAME)
    if returncode != 0:
        raise CannotStart(last_words or f"model {model!r} could not be prepared: {describe_exit(returncode)}")
