"""Compose files as data."""

from pathlib import Path
from typing import Any

import yaml


class Loader(yaml.SafeLoader):
    """Takes Compose's own tags for plain values."""


Loader.add_constructor("!override", lambda loader, node: loader.construct_sequence(node, deep=True))


def load(path: Path) -> dict[str, Any]:
    data = yaml.load(path.read_text(), Loader)
    assert isinstance(data, dict)
    return data
