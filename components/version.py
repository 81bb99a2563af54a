"""The version of kvmesh. pyproject.toml and `kvmesh --version` read it here."""

from typing import Final

VERSION: Final = "0.1.0"
