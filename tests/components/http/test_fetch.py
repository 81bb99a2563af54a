"""A request without a client library, to servers that answer and others."""

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from components.http import fetch as module
from components.http.fetch import fetch
from tests.waiting import PATIENCE_S


@contextmanager
def answering(answer: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """Send `answer` to one request and close. Yields: the URL, and the received requests."""
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection, connection.makefile("rb") as stream:
                head = b"".join(iter(lambda: stream.readline() or b"\r\n", b"\r\n"))
                size = re.search(rb"(?i)content-length: (\d+)", head)
                received.append(head + b"\r\n" + stream.read(int(size[1]) if size else 0))
                with suppress(OSError):  # the client has left
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", received
        finally:
            thread.join(PATIENCE_S)


def test_an_answer_has_its_status_headers_and_body() -> None:
    with answering(b"HTTP/1.1 404 Not Found\r\nServer: us\r\nContent-Length: 4\r\n\r\ngone") as (url, received):
        answer = fetch(f"{url}/a/b?c=d", timeout_s=PATIENCE_S, method="PATCH", body="{}", headers={"X-Of": "mine"})
    assert (answer.status, answer.headers["Server"], answer.body) == (404, "us", b"gone")
    head, _, body = received[0].partition(b"\r\n\r\n")
    assert head.splitlines()[0] == b"PATCH /a/b?c=d HTTP/1.1"
    assert b"X-Of: mine" in head
    assert body == b"{}"


def test_without_a_context_https_is_still_encrypted() -> None:
    with answering(b"HTTP/1.1 200 OK\r\n\r\n") as (url, received), pytest.raises(OSError, match=r"\w"):
        fetch(url.replace("http:", "https:"), timeout_s=0.5, headers={"Authorization": "secret"})
    assert b"secret" not in received[0]


def test_a_url_without_a_path_is_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # is not used
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n") as (url, received):
        assert fetch(url, timeout_s=PATIENCE_S).status == 200
    assert received[0].startswith(b"GET / HTTP/1.1")


@pytest.mark.parametrize("answer", [b"", b"what?\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort"])
def test_a_malformed_answer_is_an_oserror(answer: bytes) -> None:
    with answering(answer) as (url, _), pytest.raises(OSError, match=r"\w"):
        fetch(url, timeout_s=PATIENCE_S)


def test_an_endless_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 1000)
    with (
        answering(b"HTTP/1.1 200 OK\r\n\r\n" + bytes(1001)) as (url, _),
        pytest.raises(OSError, match="longer than 1000 bytes"),
    ):
        fetch(url, timeout_s=PATIENCE_S)


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999/", "http://[::1/", "http://127.0.0.1:x/"])
def test_a_bad_url_is_an_oserror(url: str) -> None:
    with pytest.raises(OSError, match=r"\w"):
        fetch(url, timeout_s=PATIENCE_S)
