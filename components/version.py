"""The version of kvmesh, which pyproject.toml and `kvmesh --version` read here."""

from typing import Final

VERSION: Final = "0.1.0"
