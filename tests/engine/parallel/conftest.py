"""One instance of two ranks over the tiny model, for all tests of a file."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.parallel.led import Led, led


@pytest.fixture(scope="module")
def led_tiny(tiny_dir: Path) -> Iterator[Led]:
    with led(tiny_dir, 2) as instance:
        yield instance
