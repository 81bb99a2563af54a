"""bench.routing prints figures of both kinds of index."""

import pytest

from bench.routing import measure


@pytest.mark.parametrize("kind", ["events", "approximate"])
def test_a_small_index_is_measured_as_a_large_one_is(kind: str) -> None:
    figures = measure(kind, 3, 3000)
    assert (figures["kind"], figures["instances"], figures["blocks"]) == (kind, 3, 3000)
    assert figures["shared_us"] > 0 < figures["add_us"]
    assert ("remove_us" in figures) == (kind == "events")
