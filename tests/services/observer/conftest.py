import pytest

from components.telemetry import otlp_sender, span_export, trace_reader
from tests.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def an_observer_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((otlp_sender, "TIMEOUT_S"), (span_export, "STOP_S"), (trace_reader, "TIMEOUT_S")):
        monkeypatch.setattr(module, name, PATIENCE_S)
