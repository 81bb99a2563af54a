from typing import Any, cast

import pytest

from components.errors import Cancelled
from components.http.connection import BodyPush
from services.frontend import reply as module
from services.frontend.reply import Reply

pytestmark = pytest.mark.anyio


class Client:
    """One that may stop reading: `push` is closed then. Notes what it gets, by either way."""

    def __init__(self) -> None:
        self.is_open = True
        self.got: list[bytes] = []
        self.meanwhile: list[bytes] = []  # is written while ASGI's `send` waits
        self.reply = Reply(self._asgi, [], cast("BodyPush", self))

    def send(self, data: bytes) -> None:
        self.got.append(b"pushed " + data)

    async def _asgi(self, message: Any) -> None:
        if message["type"] != "http.response.body":
            return
        for event in self.meanwhile:
            assert not self.reply.write(event), "it would overtake what is on its way"
        self.meanwhile.clear()
        self.got.append(message["body"])


async def test_events_leave_at_once_after_the_head_and_in_order_around_a_pause() -> None:
    client = Client()
    reply = client.reply
    assert not reply.write(b"1"), "the head is not out"
    client.meanwhile = [b"2"]
    await reply.flush()
    assert not reply.write(b"3"), "2 is still held"
    await reply.flush()
    assert reply.write(b"4")
    client.is_open = False
    assert not reply.write(b"5")
    client.is_open = True
    assert not reply.write(b"6"), "5 is still held"
    client.meanwhile = [b"7"]
    await reply.flush()
    await reply.flush()
    assert reply.write(b"8")
    reply.hold(b"9")
    await reply.flush(last=True)
    assert client.got == [b"1", b"23", b"pushed 4", b"56", b"7", b"pushed 8", b"9"]
    assert reply.answered


async def test_a_failure_follows_what_is_held_in_place_of_the_end() -> None:
    """Held events were dropped, too: a client that had paused missed text, and the begin of an item whose end it read."""
    client = Client()
    client.reply.write(b"1")
    await client.reply.flush()
    client.is_open = False
    client.reply.write(b"2")
    client.reply.hold_final_events(b"3")
    await client.reply.fail(502, b"{}", [], b"failed")
    assert client.got == [b"1", b"2failed"]
    assert (client.reply.status, client.reply.answered) == (502, True)


async def test_what_is_held_for_a_client_that_does_not_read_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HELD_BYTES", 10)
    reply = Client().reply
    reply.write(b"12345")
    reply.write(b"67890")
    with pytest.raises(Cancelled, match="too slowly"):
        reply.write(b"1")


async def test_only_what_comes_while_the_client_reads_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first event above the bound cut off a client that reads, and so did events during the flush of another."""
    monkeypatch.setattr(module, "MAX_HELD_BYTES", 10)
    client = Client()
    client.reply.write(b"12345678901")
    client.meanwhile = [b"1234567", b"89"]
    await client.reply.flush()
    await client.reply.flush()
    assert client.got == [b"12345678901", b"123456789"]
    client.is_open = False
    client.reply.write(b"12345")
    client.meanwhile = [b"1234567", b"8901"]
    with pytest.raises(Cancelled, match="too slowly"):
        await client.reply.flush()


async def test_what_is_too_much_to_hold_is_not_sent_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HELD_BYTES", 10)
    client = Client()
    client.reply.write(b"1")
    await client.reply.flush()
    client.is_open = False
    with pytest.raises(Cancelled, match="too slowly"):
        client.reply.write(b"12345678901")
    await client.reply.fail(499, b"{}", [], b"failed")
    assert client.got == [b"1", b"failed"]
