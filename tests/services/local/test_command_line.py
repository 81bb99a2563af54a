"""What the options of `python -m services.local` become."""

import json
import re
import subprocess
import sys

import pytest
import typer

from services.decode.config import DecodeSettings
from services.local.__main__ import _adapters, _devices
from services.local.plan import Plan
from services.prefill.config import PrefillSettings


def test_adapters_become_the_setting_of_both_kinds_of_workers() -> None:
    given = _adapters(["legal=adapters/legal", "org/m=/with=sign"])
    assert given is not None
    assert json.loads(given) == {"legal": "adapters/legal", "org/m": "/with=sign"}
    assert _adapters(None) is None


@pytest.mark.parametrize("given", ["legal", "=directory", "legal="])
def test_an_adapter_without_name_or_directory_is_refused(given: str) -> None:
    with pytest.raises(typer.BadParameter, match="NAME=DIRECTORY"):
        _adapters([given])


def test_help_has_the_common_options_and_cuts_no_name() -> None:
    """At 80 columns variables were cut: MESH_FRONTEND_HOS…"""

    def said(option: str) -> str:
        command = [sys.executable, "-m", "services.local", option]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True, env={"COLUMNS": "80"}
        ).stdout

    short, full = said("--help"), said("--help-all")
    assert "MESH_FRONTEND_HOST;" in short
    assert len(short.splitlines()) < 75
    assert "MESH_FRONTEND_API_KEYS_FILE" in re.sub(r"\s", "", short)
    assert "--drain-timeout" in full
    assert "--drain-timeout" not in short
    assert "--help-all" in short


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        (None, {}),
        (["cuda"], {"engine__device": "cuda"}),
        (["cuda:1"], {"engine__device": "cuda:1"}),
        (
            ["prefill=cuda:0,decode=cuda:1"],
            {"prefill_engine__device": "cuda:0", "decode_engine__device": "cuda:1"},
        ),
        (["cpu", "decode=cuda:1"], {"engine__device": "cpu", "decode_engine__device": "cuda:1"}),
    ],
)
def test_devices_are_for_all_workers_or_for_those_of_a_role(given: list[str] | None, settings: dict[str, str]) -> None:
    """Two GPUs could not be told apart: prefill and decode ran on the same one."""
    assert _devices(given) == settings
    for role, read in (("prefill", PrefillSettings), ("decode", DecodeSettings)):
        plan = Plan(dict.fromkeys(["bootstrap", "prefill", "decode", "frontend"], 1), given=settings)
        tiers = plan.children(plan.settings(), "http://e:1", "nats://n:2")
        (env,) = [spec.env for tier in tiers for spec in tier if spec.name == f"{role}-0"]
        wanted = settings.get(f"{role}_engine__device", settings.get("engine__device", "auto"))
        with pytest.MonkeyPatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            assert read().engine.device == wanted


@pytest.mark.parametrize("given", ["", "frontend=cuda", "decode=", "decode=cuda:0,decode=cuda:1", "cpu,cuda", "cuda,"])
def test_a_device_for_nobody_or_twice_is_refused(given: str) -> None:
    with pytest.raises(typer.BadParameter, match="prefill=cuda:0,decode=cuda:1"):
        _devices([given])
