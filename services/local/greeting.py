"""What is printed once the mesh serves: an address, and commands that work when pasted."""

import json
import shlex
import sys
from pathlib import Path

from components.settings import MeshSettings

QUESTION = "Name the capital of France."


def greeting(urls: list[str], model: str, settings: MeshSettings, sharing: int = 1) -> list[str]:
    """Lines to print. `model` is the name that the frontend lists, `sharing` how many of them are behind one address."""
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 64, "temperature": 0}
    ask = [
        "curl",
        "-s",
        f"{urls[0]}/v1/chat/completions",
        "-H",
        "Content-Type: application/json",
        "-d",
        json.dumps(body),
    ]
    inspect = [_python(), "-m", "services.inspect"]
    where: list[str] = []  # the inspector finds this mesh by its state directory
    if settings.state_dir != MeshSettings.model_fields["state_dir"].default:
        where = ["--state-dir", str(settings.home)]
    return [
        "",
        f"Ready: {'  '.join(urls)}" + (f"  ({sharing} frontends)" if sharing > 1 else ""),
        "",
        f"  ask:      {shlex.join(ask)}",
        f"  workers:  {shlex.join([*inspect, 'workers', *where])}",
        f"  trace:    {shlex.join([*inspect, 'trace', 'last', *where])}",
        "",
    ]


def _python() -> str:
    """How the reader starts the Python that has our packages: from here when it lies below, as .venv/bin/python does."""
    here, path = Path.cwd(), Path(sys.executable)
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
