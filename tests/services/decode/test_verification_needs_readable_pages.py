"""A decode worker that has to verify pages does not start if it cannot read them."""

import pytest

from components.wire.layout import KvRegion
from services.decode.__main__ import page_checksums
from tests.components.kv_transfer.fake_transfer import LAYOUT


def test_pages_on_an_unknown_device_end_the_start_with_a_line_that_says_why() -> None:
    with pytest.raises(SystemExit) as stopped:
        page_checksums(KvRegion(0, 1, LAYOUT, "xpu:0"))
    assert str(stopped.value) == (
        "setting verify_kv: KV cannot be verified: these pages are on xpu:0, and are read in main memory or by CUDA"
    )
