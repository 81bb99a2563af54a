"""The choice of NIXL's package, and where UCX logs."""

import os
import subprocess
import sys
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
        (None, set(), "nixl"),  # importing it names the missing package
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


def test_what_ucx_logs_does_not_come_between_the_lines_of_a_program() -> None:
    """It warns of an unused variable, by default on stdout."""
    program = (
        "import os; from components.kv_transfer.nixl_api import nixl_agent, nixl_agent_config as config;"
        " agent = nixl_agent('a', config(backends=['UCX'])); os._exit(0)"  # as list_plugins does
    )
    env = {**os.environ, "UCX_NO_SUCH_THING": "y"}
    env.pop("UCX_LOG_FILE", None)
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (done.stdout, "UCX_NO_SUCH_THING" in done.stderr) == ("", True)
