from collections.abc import Iterator

import pytest

from tests.engine.parallel.led import FORKING


@pytest.fixture(scope="session", autouse=True)
def forks_end(nothing_left_behind: None) -> Iterator[None]:
    """End the process that forks followers, before the run looks for leftover processes."""
    yield
    FORKING.close()
