"""Mooncake's connections. The library, which may not be installed, is a stand-in."""

import sys
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final

import pytest
from msgspec.structs import replace

from components.errors import BackendUnavailable
from components.kv_transfer.doorbell import DoorbellServer
from components.wire.layout import KvRegion
from tests.components.kv_transfer.fake_transfer import LAYOUT, endpoint

pytestmark = pytest.mark.anyio

PACKAGE: Final = "components.kv_transfer"
HOST: Final = "127.0.0.1"


@pytest.fixture
def mooncake(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], Any]], Any]:
    """Import the backend with `start_engine` in place of the library."""

    def imported(start_engine: Callable[[str], Any]) -> Any:
        api = SimpleNamespace(start_engine=start_engine, prepare_end=lambda _engine: None)
        monkeypatch.setitem(sys.modules, f"{PACKAGE}.mooncake_api", api)
        for name in ("mooncake_peer", "mooncake_transfer"):
            monkeypatch.setitem(sys.modules, f"{PACKAGE}.{name}", None)  # so that the end of the test removes it
            del sys.modules[f"{PACKAGE}.{name}"]
        return import_module(f"{PACKAGE}.mooncake_transfer")

    return imported


async def test_a_peer_is_connected_again_after_an_engine_did_not_start(
    mooncake: Callable[[Callable[[str], Any]], Any],
) -> None:
    """The failed connection was kept, so every later transfer to this peer failed, too."""
    engines = [SimpleNamespace(transfer_submit_write=lambda *_: 1, transfer_check_status=lambda _: 1), None]

    def start_engine(_host: str) -> Any:
        engine = engines.pop()
        if engine is None:
            raise BackendUnavailable("Mooncake's engine cannot start: no free port")
        return engine

    transfer = mooncake(start_engine).MooncakeTransfer(KvRegion(0, 100, LAYOUT, "cpu"), "prefill-p", HOST, 0)
    bell = DoorbellServer("decode-d", HOST, None)
    async with bell.listening():
        peer = replace(endpoint(), backend="mooncake", agent_metadata=f"segment,{bell.address}")
        try:
            with pytest.raises(BackendUnavailable):
                await transfer.connect(peer)
            await transfer.connect(peer)
        finally:
            await transfer.stop()
    assert not engines
