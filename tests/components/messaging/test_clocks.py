"""Deadlines by the receiver's clock."""

import logging
from typing import Any

import pytest

from components.messaging import clocks
from components.messaging.clocks import MIN_MESSAGES, SHOWN_S, WINDOW_S, PeerClocks
from components.wire.codec import Dated

LIFE_MS = 60_000
HOUR_MS = 3_600_000


class Clock:
    """Our clock, which the test moves; the sender's is `skew_ms` behind."""

    def __init__(self) -> None:
        self.monotonic_s = 1000.0
        self.skew_ms = 0

    def monotonic(self) -> float:
        return self.monotonic_s

    def time_ns(self) -> int:
        return int((1_700_000_000 + self.monotonic_s) * 1e9)

    def now_ms(self) -> int:
        return self.time_ns() // 1_000_000

    def message(self, late_s: float = 0.0, sender: str = "peer") -> Dated:
        """Return a message with a deadline in a minute, sent `late_s` ago."""
        sent = self.now_ms() - self.skew_ms - int(late_s * 1000)
        return Dated(deadline_unix_ms=sent + LIFE_MS, sender=sender, sent_unix_ms=sent)

    def left_s(self, peers: PeerClocks, late_s: float = 0.0, sender: str = "peer") -> float:
        """Return the time left of a message's minute when it is read."""
        return (peers.converted(self.message(late_s, sender)).deadline_unix_ms - self.now_ms()) / 1000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(clocks, "time", made)
    return made


def gauge(peers: PeerClocks) -> Any:
    [family] = peers.collect()
    [sample] = family.samples
    return sample.value


@pytest.mark.parametrize("skew_ms", [-HOUR_MS, HOUR_MS])
def test_deadlines_are_converted_from_the_first_message_on(clock: Clock, skew_ms: int) -> None:
    peers = PeerClocks()
    clock.skew_ms = skew_ms
    for _ in range(5):
        assert clock.left_s(peers) == pytest.approx(60, abs=0.1)
        clock.monotonic_s += 10
    assert gauge(peers) == HOUR_MS / 1000


def test_what_waited_in_the_socket_of_a_frozen_process_is_late(clock: Clock) -> None:
    peers = PeerClocks()
    clock.skew_ms = HOUR_MS
    clock.left_s(peers)
    clock.monotonic_s += 1000  # frozen: the first messages have waited longest
    assert [round(clock.left_s(peers, late_s)) for late_s in (1000, 90, 30, 0)] == [60 - 1000, 60 - 90, 30, 60]


def test_messages_that_waited_in_a_long_frozen_process_are_late_whatever_is_handled_first(clock: Clock) -> None:
    """A scrape, or a new sender, made the process forget all peers that had been silent for ten minutes.

    After a longer freeze, each waiting message counted as the first one and as on time, so prefill could write to pages
    that decode had reused.
    """
    peers = PeerClocks()
    clock.left_s(peers)
    clock.monotonic_s += SHOWN_S + 100
    gauge(peers)
    clock.left_s(peers, sender="new")
    assert clock.left_s(peers, late_s=650) == pytest.approx(60 - 650, abs=0.1)


class Fence(Dated):
    fences_writes = True


def test_a_first_message_that_waited_does_not_extend_the_deadline_of_writes(clock: Clock) -> None:
    """A prefill was stopped before it read its first messages, and continued after the offer's deadline. Their waiting time
    counted as skew, so it wrote into pages that decode had reused."""
    peers = PeerClocks()

    def left_s(late_s: float, kind: type[Dated] = Fence) -> float:
        sent = clock.message(late_s)
        message = kind(deadline_unix_ms=sent.deadline_unix_ms, sender="peer", sent_unix_ms=sent.sent_unix_ms)
        return (peers.converted(message).deadline_unix_ms - clock.now_ms()) / 1000

    assert [round(left_s(90)) for _ in range(2 * MIN_MESSAGES)] == [-30] * 2 * MIN_MESSAGES, "they waited together"
    assert round(left_s(90, Dated)) == 60, "a deadline that fences nothing is converted at once"
    clock.monotonic_s += 10
    assert round(left_s(0)) == 60
    assert round(left_s(90)) == -30


@pytest.mark.parametrize("skew_ms", [30_000, HOUR_MS])
def test_deadlines_of_writes_are_converted_once_their_sender_is_known(clock: Clock, skew_ms: int) -> None:
    """A difference of an hour is skew, not waiting time, so it is converted from the first message on."""
    peers = PeerClocks()
    clock.skew_ms = skew_ms
    left_s = []
    for _ in range(MIN_MESSAGES):
        sent = clock.message()
        message = Fence(deadline_unix_ms=sent.deadline_unix_ms, sender="peer", sent_unix_ms=sent.sent_unix_ms)
        left_s.append(round((peers.converted(message).deadline_unix_ms - clock.now_ms()) / 1000))
        clock.monotonic_s += 1
    assert left_s == ([30, 30, 60] if skew_ms < HOUR_MS else [60, 60, 60])


def test_the_peer_that_was_silent_longest_is_forgotten_for_a_new_one(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clocks, "MAX_PEERS", 2)
    peers = PeerClocks()
    for sender in ("a", "b", "a", "c"):
        clock.monotonic_s += 1
        clock.left_s(peers, sender=sender)
    assert clock.left_s(peers, late_s=90, sender="a") == pytest.approx(60 - 90, abs=0.1)
    assert clock.left_s(peers, late_s=90, sender="b") == pytest.approx(60, abs=0.1), "its first message, as it seems"


def test_a_clock_that_is_set_right_is_followed(clock: Clock) -> None:
    peers = PeerClocks()
    clock.skew_ms = -HOUR_MS  # theirs is ahead,
    clock.left_s(peers)
    clock.skew_ms = 0  # and is set back
    for _ in range(4):
        clock.monotonic_s += 0.6 * WINDOW_S
        left_s = clock.left_s(peers)
    assert left_s == pytest.approx(60, abs=0.1)
    clock.skew_ms = -HOUR_MS  # set forward: seen at once
    assert clock.left_s(peers) == pytest.approx(60, abs=0.1)


def test_each_peer_has_a_clock_of_its_own_and_the_worst_is_shown(clock: Clock) -> None:
    peers = PeerClocks()
    clock.left_s(peers, sender="a")
    clock.skew_ms = 30_000
    assert clock.left_s(peers, sender="b") == pytest.approx(60, abs=0.1)
    assert gauge(peers) == 30
    clock.monotonic_s += SHOWN_S + 1
    assert gauge(peers) == 0, "nobody has sent for a while"


def test_two_roles_may_have_one_id_and_different_clocks(clock: Clock) -> None:
    """They shared one measurement, so deadlines of one were early."""

    class FromDecode(Dated):
        sent_by = "decode"

    class FromBootstrap(Dated):
        sent_by = "bootstrap"

    peers = PeerClocks()
    for skew_ms, kind in ((0, FromDecode), (30_000, FromBootstrap)):
        clock.skew_ms = skew_ms
        sent = clock.message()
        message = kind(deadline_unix_ms=sent.deadline_unix_ms, sender="a", sent_unix_ms=sent.sent_unix_ms)
        assert peers.converted(message).deadline_unix_ms - clock.now_ms() == LIFE_MS


def test_small_differences_and_unknown_ones_leave_a_deadline_as_it_is(clock: Clock) -> None:
    peers = PeerClocks()
    clock.skew_ms = 700
    message = clock.message()
    assert peers.converted(message) is message
    unknown = Dated(deadline_unix_ms=5)
    assert peers.converted(unknown) is unknown


def test_skew_is_logged_once_for_a_peer_and_again_when_it_changes(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    peers = PeerClocks()

    def told() -> list[tuple[str, float]]:
        said = [(r.__dict__["peer"], r.__dict__["ahead_of_peer_s"]) for r in caplog.records]
        caplog.clear()
        return said

    with caplog.at_level(logging.WARNING):
        clock.skew_ms = -HOUR_MS
        for sender in "aab":
            clock.left_s(peers, sender=sender)
        assert told() == [("a", -3600.0), ("b", -3600.0)]
        clock.skew_ms = -HOUR_MS - 10_000
        clock.left_s(peers, sender="a")
        assert told() == []
        clock.skew_ms = -3 * HOUR_MS
        clock.left_s(peers, sender="a")
        assert told() == [("a", -3 * 3600.0)]
        clock.skew_ms = HOUR_MS
        for _ in range(MIN_MESSAGES):
            assert told() == [], "one message alone may have been late"
            clock.left_s(peers, sender="c")
        assert told() == [("c", 3600.0)]
