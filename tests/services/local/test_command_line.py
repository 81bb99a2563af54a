"""What the options of `python -m services.local` become."""

import json

import pytest
import typer

from services.local.__main__ import _adapters


def test_adapters_become_the_setting_of_both_kinds_of_workers() -> None:
    given = _adapters(["legal=adapters/legal", "org/m=/with=sign"])
    assert given is not None
    assert json.loads(given) == {"legal": "adapters/legal", "org/m": "/with=sign"}
    assert _adapters(None) is None


@pytest.mark.parametrize("given", ["legal", "=directory", "legal="])
def test_an_adapter_without_name_or_directory_is_refused(given: str) -> None:
    with pytest.raises(typer.BadParameter, match="NAME=DIRECTORY"):
        _adapters([given])
