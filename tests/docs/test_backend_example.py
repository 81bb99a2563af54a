"""The example of docs/writing-a-kv-transfer-backend.md, up to the omitted classes."""

from types import SimpleNamespace
from typing import Any

import pytest

from components.errors import BackendUnavailable
from tests.docs.pages import REPO

pytestmark = pytest.mark.anyio


async def test_the_example_refuses_a_device_that_it_does_not_know() -> None:
    """It lacked its imports: a copy raised NameError."""
    page = (REPO / "docs" / "writing-a-kv-transfer-backend.md").read_text()
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    region = SimpleNamespace(device="cpu")
    with pytest.raises(BackendUnavailable, match="use nixl"):
        await names["open_ascend"](region, "agent", plugin="", host="", max_request_pages=1).__aenter__()
