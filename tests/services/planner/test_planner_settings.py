"""Settings from the command line and the environment."""

import pytest
from pydantic import ValidationError

from components.planning.planner import Bounds
from components.settings import misspelled
from services.decode.config import DecodeSettings
from services.planner.config import PlannerSettings


def test_ranges_come_from_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_PLANNER_DECODE", "2")
    settings = PlannerSettings.read(["--prefill", "1..4", "--ttft-ms", "800", "--connector", "local"])
    assert settings.bounds() == {"prefill": Bounds(1, 4), "decode": Bounds(2, 2)}
    assert settings.targets().ttft_s == 0.8
    assert settings.connector == "local"


@pytest.mark.parametrize("text", ["0..3", "3..2", "many", "1..", "-1"])
def test_a_malformed_range_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="must be MIN"):
        PlannerSettings(prefill=text)


def test_other_services_ignore_its_variables() -> None:
    environ = {"MESH_PLANNER_PREFILL": "1..2", "MESH_PLANNER_TTFT_MS": "3"}
    assert misspelled(environ, DecodeSettings) == []
    assert misspelled(environ, PlannerSettings) == []
    assert "MESH_PLANNER_TFTT_MS" in misspelled({"MESH_PLANNER_TFTT_MS": "1"}, PlannerSettings)[0]
