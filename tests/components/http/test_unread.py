"""A client is too slow if it reads no waiting bytes, or too few."""

import socket
from dataclasses import replace
from typing import Final

import pytest

from components.http.limits import ClientLimits, Unread, undelivered_bytes
from tests.waiting import wait_until

LIMITS: Final = ClientLimits(unread_s=20.0, bytes_per_s=1000.0)
FULL: Final = 80_000


def seconds_until_closed(rate: float, most_s: int = 1000, level: int = FULL) -> int | None:
    """Return when a client that reads `rate` bytes a second, with a full buffer, is closed; None: never."""
    unread, taken = Unread(LIMITS, 0.0), 0.0
    for now_s in range(1, most_s):
        taken += rate
        if unread.is_too_long(now_s, int(taken) + level, level, is_full=True):
            return now_s
    return None


def test_a_client_that_takes_nothing_is_too_slow() -> None:
    assert seconds_until_closed(0) == 21


@pytest.mark.parametrize("rate", [1000, 5000, 10**7])
def test_a_client_that_reads_fast_enough_is_not_although_the_buffer_is_always_as_full(rate: float) -> None:
    assert seconds_until_closed(rate) is None


def test_a_client_that_reads_half_as_fast_as_it_must_gets_twice_the_time() -> None:
    assert seconds_until_closed(500) == 41


def test_what_was_read_fast_is_no_credit_for_later() -> None:
    unread = Unread(LIMITS, 0.0)
    assert not unread.is_too_long(1.0, 10**9 + FULL, FULL, is_full=True)
    assert not unread.is_too_long(21.0, 10**9 + FULL, FULL, is_full=True)
    assert unread.is_too_long(21.5, 10**9 + FULL, FULL, is_full=True)


@pytest.mark.parametrize(("waiting", "is_full"), [(0, True), (FULL, False), (0, False)])
def test_only_time_in_which_an_answer_waits_counts(waiting: int, is_full: bool) -> None:
    unread = Unread(LIMITS, 0.0)
    assert not unread.is_too_long(100.0, FULL, waiting, is_full=is_full)
    assert not unread.is_too_long(119.0, FULL, FULL, is_full=True)
    assert unread.is_too_long(121.0, FULL, FULL, is_full=True)


def test_time_in_which_the_process_did_not_run_is_left_out() -> None:
    unread = Unread(replace(LIMITS, unread_s=1.0), 0.0)
    unread.held_up(30.0)
    assert not unread.is_too_long(30.5, FULL, FULL, is_full=True)
    assert unread.is_too_long(31.6, FULL, FULL, is_full=True)


def test_bytes_that_leave_the_kernel_count_while_it_takes_none_from_this_process() -> None:
    """A client that read 10,000 bytes/s was closed: the kernel accepts bytes in large steps, over 20 s apart."""
    unread, in_kernel = Unread(LIMITS, 0.0), 400_000
    for now_s in range(1, 40):
        in_kernel -= 10_000
        assert not unread.is_too_long(now_s, 10**6, FULL, undelivered=in_kernel, is_full=True)
    assert not unread.is_too_long(59, 10**6, FULL, undelivered=in_kernel, is_full=True)
    assert unread.is_too_long(60, 10**6, FULL, undelivered=in_kernel, is_full=True)


def test_the_kernel_reports_what_a_peer_has_not_taken() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as client, listener.accept()[0] as server:
        server.setblocking(False)
        sent = 0
        while True:
            try:
                sent += server.send(bytes(65_536))
            except BlockingIOError:
                break
        assert 0 < undelivered_bytes(server.fileno()) <= sent
        while sent:
            sent -= len(client.recv(65_536))
        wait_until(lambda: undelivered_bytes(server.fileno()) == 0)
    assert undelivered_bytes(-1) == 0
