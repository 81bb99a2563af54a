"""Command-line options that comparisons share."""

import sys
from collections.abc import Sequence
from subprocess import run


def name_values(given: Sequence[str], option: str) -> dict[str, str]:
    """NAME=VALUE each. Exits, naming a wrong option."""
    for setting in given:
        if "=" not in setting:
            sys.exit(f"{option} {setting}: write NAME=VALUE")
    return dict(setting.split("=", 1) for setting in given)


def model_directory(model: str) -> str:
    """Converts the model first if needed."""
    asked = run([sys.executable, "-m", "engine.model", model], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        sys.exit(asked.stderr)
    return asked.stdout.strip()
