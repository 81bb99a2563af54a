from collections.abc import Iterator

import pytest

from tests.engine.parallel.led import FORKING


@pytest.fixture(scope="session", autouse=True)
def forks_end(nothing_left_behind: None) -> Iterator[None]:
    """What forks followers ends before the run looks for processes that are left."""
    yield
    FORKING.close()
