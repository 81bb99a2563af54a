import pytest

from services.planner import pages
from tests.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def a_page_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "TIMEOUT_S", PATIENCE_S)
