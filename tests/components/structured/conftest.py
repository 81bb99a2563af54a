from pathlib import Path

import pytest

from engine.model.mock_model import mock_dir


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokens are bytes."""
    return mock_dir(tmp_path_factory.mktemp("models"))
