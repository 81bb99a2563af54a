"""Sends encoded spans to an OTLP/HTTP receiver. While it is unreachable, requests are queued up to a limit in bytes.

Runs on the export thread. OpenTelemetry's variables for headers, certificate and compression are honoured.
"""

import gzip
import http.client
import logging
import os
import ssl
import time
from base64 import b64encode
from collections import deque
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from components.telemetry.trace_pieces import PIECES
from components.urls import is_loopback, login_of, without_password

log = logging.getLogger(__name__)

PATH: Final = "/v1/traces"
TIMEOUT_S: Final = 2.0  # short, so a receiver that hangs does not delay a stop
WAITING_BYTES: Final = 8 << 20
FIRST_WAIT_S: Final = 0.5  # after a failure; doubles
LONGEST_WAIT_S: Final = 10.0
RETRIED: Final = frozenset({408, 429, 502, 503, 504})
OBSERVER: Final = "kvmesh-observer"  # its Server header
OTLP: Final = "application/x-protobuf"


class OtlpSender:
    def __init__(self, endpoint: str, ca: Path | None = None) -> None:
        """`ca`: PEM file of authorities; None: the system's."""
        self._ca = ca
        address = urlsplit(endpoint)
        self._place = without_password(endpoint)  # for log messages
        self._secure = address.scheme == "https"
        self._host = address.hostname or ""
        self._port = address.port or (443 if self._secure else 80)
        self._path = address.path.rstrip("/") + PATH
        self._headers = {**_given_headers(), **login_header(endpoint)}
        wanted = os.environ.get("OTEL_EXPORTER_OTLP_COMPRESSION")
        if wanted == "gzip" or (wanted is None and not is_loopback(self._host)):
            self._headers["Content-Encoding"] = "gzip"
        self._connection: http.client.HTTPConnection | None = None
        self._waiting: deque[tuple[bytes, str, int]] = deque()  # request, content type, spans
        self._waiting_bytes = 0
        self._wait_s = FIRST_WAIT_S
        self._not_before = 0.0  # monotonic
        self._has_warned = False
        self.is_observer: bool | None = None  # None: no answer yet
        self.takes_pieces = False  # an observer has announced this
        self.dropped = 0  # spans, while the receiver was unreachable
        self.refused = 0  # spans that it refused

    def greet(self) -> None:
        """Learn what the receiver is, by a request without spans."""
        self.send(b"", OTLP, 0)

    def send(self, request: bytes, kind: str, num_spans: int) -> None:
        """Send a request, or queue it. `kind`: its content type."""
        self._waiting.append((request, kind, num_spans))
        self._waiting_bytes += len(request)
        while self._waiting_bytes > WAITING_BYTES and len(self._waiting) > 1:
            self._drop("the receiver is unreachable and the queue is full")
        self.send_waiting()

    def send_waiting(self, *, last: bool = False) -> None:
        """`last`: this process is ending, so try once, then drop the rest."""
        if last and self._waiting and not self._waiting[0][2]:
            self._waiting.popleft()  # the greeting
        if last or time.monotonic() >= self._not_before:
            until = time.monotonic() + TIMEOUT_S
            while self._waiting and not (last and time.monotonic() > until) and self._sent(*self._waiting[0][:2]):
                body = self._waiting.popleft()[0]
                self._waiting_bytes -= len(body)
        while last and self._waiting:
            self._drop("this process is ending")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _sent(self, body: bytes, kind: str) -> bool:
        """False: the request must be sent again."""
        reused = self._connection is not None
        try:
            status, reason = self._post(body, kind)
        except (OSError, http.client.HTTPException) as exc:
            self.close()
            if reused:  # the receiver may have closed an idle connection
                return self._sent(body, kind)
            return self._failed(str(exc) or type(exc).__name__)
        except ValueError:  # its text contains the header, which may be a secret
            self.close()
            return self._failed("a header of OTEL_EXPORTER_OTLP_HEADERS is not valid in HTTP")
        return self._judge(status, reason)

    def _judge(self, status: int, reason: str) -> bool:
        if status in RETRIED:
            return self._failed(f"status {status}: {reason}")
        count = self._waiting[0][2]
        if status >= 300 and count:
            self.refused += count
            facts = {"receiver": self._place, "status": status, "reason": reason, "count": count}
            log.warning("spans refused by the OTLP receiver", extra=facts)
        self._wait_s, self._not_before, self._has_warned = FIRST_WAIT_S, 0.0, False
        return True

    def _post(self, body: bytes, kind: str) -> tuple[int, str]:
        """The status and the beginning of the answer's text."""
        if "Content-Encoding" in self._headers:
            body = gzip.compress(body, 1)
        if self._connection is None:
            self._connection = self._connect()
        self._connection.request("POST", self._path, body, {"Content-Type": kind, **self._headers})
        with self._connection.getresponse() as answer:
            self.is_observer = bool(self.is_observer) or answer.headers.get("Server") == OBSERVER
            self.takes_pieces = self.is_observer and PIECES in answer.headers.get("Accept-Post", "")
            text = answer.read().decode(errors="replace").strip()
            return answer.status, text[:200] if text.isprintable() else ""

    def _connect(self) -> http.client.HTTPConnection:
        if not self._secure:
            return http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        context = trusting(self._ca)  # read for each connection, because the file may have been replaced
        return http.client.HTTPSConnection(self._host, self._port, timeout=TIMEOUT_S, context=context)

    def _failed(self, cause: str) -> bool:
        if not self._has_warned and any(num_spans for *_, num_spans in self._waiting):
            self._has_warned = True
            log.warning("OTLP receiver unreachable, spans are queued", extra={"receiver": self._place, "cause": cause})
        self._not_before = time.monotonic() + self._wait_s
        self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)
        return False

    def _drop(self, cause: str) -> None:
        body, _, num_spans = self._waiting.popleft()
        self._waiting_bytes -= len(body)
        self.dropped += num_spans
        if num_spans:
            log.warning("spans dropped", extra={"receiver": self._place, "cause": cause, "count": num_spans})


def trusting(ca: Path | None) -> ssl.SSLContext:
    """Trust the authorities in the file that OpenTelemetry's variable names, else in `ca`.

    Raises: OSError, with the file's name.
    """
    path = os.environ.get("OTEL_EXPORTER_OTLP_CERTIFICATE") or (None if ca is None else str(ca))
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as exc:  # OpenSSL does not name a missing file
        raise OSError(f"{path}: no PEM certificates can be read there ({exc.strerror or exc})") from exc


def login_header(endpoint: str) -> dict[str, str]:
    """The header with the user and password of a URL, if it has any."""
    user, password = login_of(endpoint)
    if user is None and password is None:
        return {}
    login = f"{user or ''}:{password or ''}"
    return {"Authorization": f"Basic {b64encode(login.encode()).decode()}"}


def _given_headers() -> dict[str, str]:
    """OTEL_EXPORTER_OTLP_HEADERS: `name=value,…`, percent-encoded."""
    given = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_HEADERS") or os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "")
    pairs = (pair.partition("=") for pair in given.split(",") if "=" in pair)
    return {unquote(name.strip()): unquote(value.strip()) for name, _, value in pairs}
