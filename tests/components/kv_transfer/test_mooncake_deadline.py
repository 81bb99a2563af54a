"""Mooncake's writes and the deadline of their offer. The library, which may not be installed, is a stand-in."""

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any, Final

import pytest

from components.errors import DeadlineExceeded
from components.kv_transfer import backend
from tests.components.kv_transfer.fake_transfer import endpoint
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.anyio

PACKAGE: Final = "components.kv_transfer"
NUM_PIECES: Final = 100
IN_TIME_MS, DEADLINE_MS, LATE_MS = 1000, 2000, 3000


@dataclass
class Engine:
    """Replaces mooncake.engine.TransferEngine."""

    posted: list[int] = field(default_factory=list)  # targets
    lands: bool = True

    def transfer_submit_write(self, _segment: str, _source: int, target: int, _num_bytes: int) -> int:
        self.posted.append(target)
        return len(self.posted)

    def transfer_check_status(self, _batch: int) -> int:
        return int(self.lands)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def mooncake_peer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the module with a stand-in for the library."""
    api = SimpleNamespace(start_engine=lambda _host: engine, prepare_end=lambda _engine: None)
    monkeypatch.setitem(sys.modules, f"{PACKAGE}.mooncake_api", api)
    monkeypatch.setitem(sys.modules, f"{PACKAGE}.mooncake_peer", None)  # so that the end of the test removes it
    del sys.modules[f"{PACKAGE}.mooncake_peer"]
    return import_module(f"{PACKAGE}.mooncake_peer")


@pytest.mark.parametrize("num_in_time", [0, 1, 64, 70, NUM_PIECES])
async def test_no_piece_is_posted_after_the_deadline_and_the_write_ends_when_those_before_it_have_landed(
    num_in_time: int, engine: Engine, mooncake_peer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = mooncake_peer.MooncakePeer(endpoint(), "segment", "127.0.0.1")
    await peer.opened()
    engine.posted.clear()
    engine.lands = False
    clock_ms: Iterator[int] = chain(repeat(IN_TIME_MS, num_in_time), repeat(LATE_MS))
    monkeypatch.setattr(backend, "time", SimpleNamespace(time=lambda: next(clock_ms) / 1000))
    pieces = [mooncake_peer.Piece(at, at, 8) for at in range(NUM_PIECES)]
    write = asyncio.ensure_future(peer.write(pieces, DEADLINE_MS))
    await until(lambda: len(engine.posted) >= min(num_in_time, mooncake_peer.IN_FLIGHT))
    assert not (write.done() and num_in_time), "pieces are in flight"
    engine.lands = True
    if num_in_time == NUM_PIECES:
        assert await asyncio.wait_for(write, PATIENCE_S) == 8 * NUM_PIECES
    else:
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(write, PATIENCE_S)
    assert engine.posted == list(range(num_in_time))
    await peer.stop()
