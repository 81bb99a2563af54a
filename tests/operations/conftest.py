"""Who forks the services of the meshes here."""

from collections.abc import Iterator

import pytest

from tests.mesh.preloaded import Preloaded


@pytest.fixture(scope="session")
def preloaded(nothing_left_behind: None) -> Iterator[Preloaded]:
    with Preloaded() as forking:
        yield forking
