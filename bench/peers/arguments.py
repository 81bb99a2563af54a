"""Command-line options of the comparisons."""

import sys
from collections.abc import Sequence
from subprocess import run


def name_values(given: Sequence[str], option: str) -> dict[str, str]:
    """Parse NAME=VALUE options. Exit with a message if one is wrong."""
    for setting in given:
        if "=" not in setting:
            sys.exit(f"{option} {setting}: must be NAME=VALUE")
    return dict(setting.split("=", 1) for setting in given)


def model_directory(model: str) -> str:
    """Return the model's directory, and convert the model first if needed."""
    asked = run([sys.executable, "-m", "engine.model", model], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        sys.exit(asked.stderr)
    return asked.stdout.strip()
