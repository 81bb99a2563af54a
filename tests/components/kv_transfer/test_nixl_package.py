"""Which of NIXL's packages is imported."""

from importlib import metadata

import pytest

from components.kv_transfer import nixl_api


@pytest.mark.parametrize(
    ("torch", "installed", "chosen"),
    [
        ("2.13.0+cpu", {"nixl", "nixl_cu13", "nixl_cu12"}, "nixl_cu13"),
        ("2.13.0+cpu", {"nixl", "nixl_cu12"}, "nixl_cu12"),
        ("2.13.0", {"nixl", "nixl_cu13", "nixl_cu12"}, "nixl"),
        ("2.13.0", {"nixl_cu13"}, "nixl_cu13"),
        (None, {"nixl"}, "nixl"),
        (None, set(), "nixl"),  # its import says what is missing
    ],
)
def test_the_build_is_chosen_by_torch_and_by_what_is_installed(
    torch: str | None, installed: set[str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if torch is None:
            raise metadata.PackageNotFoundError(name)
        return torch

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(nixl_api, "find_spec", lambda name: name in installed or None)
    assert nixl_api._package() == chosen
