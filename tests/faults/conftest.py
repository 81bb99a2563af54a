"""One home for all runs: nothing is in it but the mock's model."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the engines of all runs find their model."""
    return tmp_path_factory.mktemp("faults")
