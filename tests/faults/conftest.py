from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the mock's model, shared by all runs."""
    return tmp_path_factory.mktemp("faults")
