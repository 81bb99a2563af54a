"""Figures of a benchmark, run like users run it."""

import json
import subprocess
import sys
from typing import Any

from tests.conftest import REPO
from tests.waiting import PATIENCE_S


def figures_of(module: str, *options: str) -> list[dict[str, Any]]:
    """Return the JSON lines of `python -m module`."""
    command = [sys.executable, "-m", module, *options]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
