import time

import pytest

from components.kv_transfer.slow_peers import MIN_JUDGED_BYTES, SLOW_BYTES_S, SlowPeers

LONG_S = 2 * MIN_JUDGED_BYTES / SLOW_BYTES_S


def test_a_slow_peer_is_logged_once_until_it_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    peers = SlowPeers()
    peers.judge("decode", MIN_JUDGED_BYTES, time.monotonic())
    peers.judge("decode", MIN_JUDGED_BYTES - 1, time.monotonic() - LONG_S)
    assert not caplog.records
    for _ in range(2):
        peers.judge("decode", MIN_JUDGED_BYTES, time.monotonic() - LONG_S)
    (record,) = caplog.records
    assert "through host memory" in record.getMessage()
    assert vars(record)["peer"] == "decode"
    assert 0 < vars(record)["gb_s"] <= SLOW_BYTES_S / 2e9
    peers.judge("another", MIN_JUDGED_BYTES, time.monotonic() - LONG_S)
    peers.forget("decode")
    peers.judge("decode", MIN_JUDGED_BYTES, time.monotonic() - LONG_S)
    assert len(caplog.records) == 3
