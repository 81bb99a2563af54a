"""Random bytes of requests to a server on a socket.

Each whole request is answered once and in order, in any framing. Damaged or short ones soon get an answer, which is never
a 5xx, or a close. The next client is answered.
"""

import re
import socket
import time
from dataclasses import dataclass
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import RunService
from tests.fuzz.mutations import damaged
from tests.services.frontend.test_idle_connections import resident_bytes
from tests.waiting import PATIENCE_S

LAST: Final = b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
SLOW: Final = [HealthCheck.too_slow, HealthCheck.data_too_large]
TOKEN: Final = st.text(st.sampled_from("abcXYZ019-_!#$%&'*+.^`|~"), min_size=1, max_size=12).map(str.encode)
VALUE: Final = st.text(st.sampled_from("abc XYZ,;=\"'\t:()<>@/[]{}?\\"), max_size=30).map(str.strip).map(str.encode)
NAMES: Final = [
    b"host",
    b"Authorization",
    b"connection",
    b"expect",
    b"x-request-id",
]  # repeated framing headers are a 400
TRAILERS: Final = st.lists(st.tuples(st.sampled_from(NAMES) | TOKEN, VALUE), max_size=4)


@dataclass(frozen=True, slots=True)
class Sent:
    """A request and its answer."""

    data: bytes
    answer: bytes


@st.composite
def chunked(draw: st.DrawFn, body: bytes) -> bytes:
    """Draw a body in chunks, with extensions and trailers."""
    out = b""
    extension = st.just(b"") | TOKEN.map(lambda name: b";" + name) | TOKEN.map(lambda name: b';a="' + name + b'"')
    while body:
        size = draw(st.integers(1, len(body)))
        number = draw(st.sampled_from([b"%x", b"%X", b"0%x", b"000%x"])) % size
        out += number + draw(extension) + b"\r\n" + body[:size] + b"\r\n"
        body = body[size:]
    trailers = b"".join(b"%b: %b\r\n" % trailer for trailer in draw(TRAILERS))
    return out + draw(st.sampled_from([b"0", b"000"])) + draw(extension) + b"\r\n" + trailers + b"\r\n"


@st.composite
def requests(draw: st.DrawFn, number: int) -> Sent:
    """Draw a whole request; `number` is in its path."""
    method = draw(st.sampled_from([b"GET", b"POST", b"PUT", b"DELETE", b"OPTIONS"]))
    path = b"/%d/%b" % (number, draw(st.text(st.sampled_from("abc%20?=&;~"), max_size=8).map(str.encode)))
    own = draw(st.lists(st.tuples(TOKEN.map(lambda name: b"x-" + name), VALUE), max_size=3))
    headers = [
        (draw(st.sampled_from([b"Host", b"host", b"HOST"])), draw(st.sampled_from([b"x", b"127.0.0.1:80"]))),
        *own,
    ]
    body = draw(st.binary(max_size=300))
    framing = draw(st.sampled_from(["none", "length", "chunked"]))
    if framing == "length":
        headers.append((b"Content-Length", b"%d" % len(body)))
    elif framing == "chunked":
        headers.append((b"Transfer-Encoding", b"chunked"))
    if framing != "none" and draw(st.integers(0, 4)) == 0:
        headers.append((b"Expect", b"100-continue"))
    headers = draw(st.permutations(headers))
    head = b"%b %b HTTP/1.1\r\n" % (method, path) + b"".join(b"%b: %b\r\n" % header for header in headers) + b"\r\n"
    data = body if framing == "length" else draw(chunked(body)) if framing == "chunked" else b""
    size = 0 if framing == "none" else len(body)
    names = b",".join(name.lower() for name, _ in headers)
    return Sent(head + data, b"%b %d %b" % (path.partition(b"?")[0], size, names))


STREAMS: Final = st.integers(1, 8).flatmap(lambda count: st.tuples(*(requests(i) for i in range(count))))
ENDS_WITHIN_S: Final = 30.0  # the server's limits are 0.5 s, and 75 s for idle connections
CUTS: Final = st.lists(st.integers(0, 3000), max_size=6) | st.just(list(range(400)))


class Server:
    def __init__(self, port: int) -> None:
        self._port = port

    def ask(self, data: bytes, cuts: list[int]) -> list[tuple[int, bytes]]:
        """Send the bytes, cut at `cuts`. Return status and body of each answer until the server closes."""
        with socket.create_connection(("127.0.0.1", self._port), timeout=PATIENCE_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ends = [*sorted({cut for cut in cuts if 0 < cut < len(data)}), len(data)]
            try:
                for start, end in zip([0, *ends], ends, strict=False):
                    connection.sendall(data[start:end])
            except OSError:
                pass  # closed: its answer can still be read
            got = b""
            try:
                while some := connection.recv(65_536):
                    got += some
            except ConnectionResetError:
                pass
        return answers_in(got)

    def is_well(self) -> None:
        """The next client is answered."""
        assert self.ask(LAST, []) == [(200, b"/last 0 host,connection")]


def answers_in(got: bytes) -> list[tuple[int, bytes]]:
    """Parse the answers, of which the last may be incomplete."""
    found = []
    while got:
        head, _, got = got.partition(b"\r\n\r\n")
        status = re.match(rb"HTTP/1\.1 (\d{3}) ", head)
        assert status, head
        if status[1] == b"100":
            continue
        length = re.search(rb"\r\ncontent-length: (\d+)", head)
        assert length, head
        size = int(length[1])
        found.append((int(status[1]), got[:size]))
        got = got[size:]
    return found


def expected(sent: tuple[Sent, ...]) -> list[tuple[int, bytes]]:
    return [(200, request.answer) for request in sent]


def few() -> int:
    """Return the number of examples, many of which last until a time limit."""
    return max(25, settings().max_examples // 10)


@pytest.mark.timeout(1800)  # make fuzz has thirty times as many examples
def test_whatever_comes_in_is_answered_in_order_or_refused(run_service: RunService) -> None:
    process = run_service("tests.fuzz.serve_paths")
    process.wait_for_log("url=")
    found = re.search(r"url=http://127\.0\.0\.1:(\d+)", process.logged())
    assert found
    server = Server(int(found[1]))
    server.is_well()
    before = resident_bytes(process.popen.pid)

    @settings(deadline=None, suppress_health_check=SLOW)
    @given(sent=STREAMS, cuts=CUTS)
    def whole(sent: tuple[Sent, ...], cuts: list[int]) -> None:
        answers = server.ask(b"".join(request.data for request in sent) + LAST, cuts)
        assert answers == [*expected(sent), (200, b"/last 0 host,connection")]

    @settings(deadline=None, suppress_health_check=SLOW, max_examples=few())
    @given(sent=STREAMS, cuts=CUTS, missing=st.integers(1, 400))
    def cut_short(sent: tuple[Sent, ...], cuts: list[int], missing: int) -> None:
        tail = sent[-1].data[: -min(missing, len(sent[-1].data) - 1)]
        began = time.monotonic()
        answers = server.ask(b"".join(request.data for request in sent[:-1]) + tail, cuts)
        assert answers[:-1] == expected(sent[:-1])
        assert answers[-1][0] == 408
        assert time.monotonic() - began < ENDS_WITHIN_S

    @settings(deadline=None, suppress_health_check=SLOW, max_examples=few())
    @given(sent=STREAMS, cuts=CUTS, data=st.data())
    def broken(sent: tuple[Sent, ...], cuts: list[int], data: st.DataObject) -> None:
        good = b"".join(request.data for request in sent)
        bad = data.draw(damaged(good))
        began = time.monotonic()
        answers = server.ask(bad + LAST, cuts)
        assert time.monotonic() - began < ENDS_WITHIN_S
        assert all(status < 500 or status == 505 for status, _ in answers)
        same = next((i for i, (a, b) in enumerate(zip(good, bad, strict=False)) if a != b), min(len(good), len(bad)))
        untouched = 0
        while untouched < len(sent) and sum(len(request.data) for request in sent[: untouched + 1]) <= same:
            untouched += 1
        of_those = [answer for answer in answers[:untouched] if answer[0] == 200]
        assert of_those == expected(sent)[: len(of_those)]

    for judge in (whole, cut_short, broken):
        judge()
        server.is_well()
    assert resident_bytes(process.popen.pid) - before < 64 * 2**20
    assert process.popen.poll() is None
