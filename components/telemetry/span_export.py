"""Exports finished spans on a thread: into this host's file, or to an OTLP receiver, or both.

An observer keeps what it receives in a file of its own, so nothing is written here once one has answered. Any other
receiver, or none, leaves the file on.
"""

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from components.telemetry.light_span import LightSpan
from components.telemetry.otlp_encoder import encode_request, encode_resource, encode_span, span_field
from components.telemetry.otlp_sender import OtlpSender
from components.telemetry.trace_store import REQUEST_ID, Piece, Root, TraceWriter

log = logging.getLogger(__name__)

EVERY_S: Final = 0.5  # so that `inspect trace last` shows the latest request
BATCH: Final = 2048  # spans in one request: some 400 KB
MOST_WAITING: Final = 16_384  # spans; more are dropped and counted
STOP_S: Final = 5.0  # for the last export


class SpanExport:
    """`put` may be called on any thread; it neither blocks nor encodes."""

    def __init__(
        self, service: str, resource: Mapping[str, Any], file: TraceWriter, sender: OtlpSender | None = None
    ) -> None:
        self._service = service
        self._resource = encode_resource(resource)
        self._file = file
        self._sender = sender
        self._waiting: deque[LightSpan] = deque()
        self._stopping = threading.Event()
        self._too_many = 0  # spans for which there was no room here
        self._unwritten = 0  # spans that the file did not take
        self._thread = threading.Thread(target=self._run, name="span-export", daemon=True)

    @property
    def dropped(self) -> Mapping[str, int]:
        """Spans that this process dropped, by cause. With `receiver_*` the file may still have them."""
        sender = self._sender
        return {
            "export_slow": self._too_many,
            "file": self._unwritten,
            "receiver_away": 0 if sender is None else sender.dropped,
            "receiver_refused": 0 if sender is None else sender.refused,
        }

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Export the spans that wait, within STOP_S."""
        self._stopping.set()
        self._thread.join(STOP_S)

    def put(self, span: LightSpan) -> None:
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(span)
        else:
            self._too_many += 1

    def _run(self) -> None:
        dropped = 0
        while not self._stopping.wait(EVERY_S):
            self._export_safely()
            if self._too_many > dropped:
                log.warning(
                    "spans dropped", extra={"cause": "the export is too slow", "count": self._too_many - dropped}
                )
                dropped = self._too_many
        self._export_safely()
        if self._sender is not None:
            self._sender.send_waiting(last=True)
            self._sender.close()
        self._file.close()

    def _export_safely(self) -> None:
        try:
            self._export()
        except Exception:
            log.exception("spans not exported")  # the next batch may succeed

    def _export(self) -> None:
        while batch := [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]:
            pieces = pieces_of(batch)
            sender = self._sender
            if sender is not None:
                sender.send(encode_request(self._resource, [piece.spans for piece in pieces]), len(batch))
            if (sender is None or not sender.is_observer) and not self._file.write(self._service, pieces):
                self._unwritten += len(batch)
        if self._sender is not None:
            self._sender.send_waiting()


def pieces_of(spans: Sequence[LightSpan]) -> list[Piece]:
    """The spans by trace: the store keeps a row of each, and the observer need not sort them."""
    by_trace: dict[int, list[LightSpan]] = defaultdict(list)
    for span in spans:
        by_trace[span.trace_id].append(span)
    return [
        Piece(
            f"{trace_id:032x}",
            min(span.start_time for span in found),
            len(found),
            b"".join([span_field(encode_span(span)) for span in found]),
            [
                Root(span.start_time, not span.status.is_ok, span.attributes)
                for span in found
                if REQUEST_ID in span.attributes
            ],
        )
        for trace_id, found in by_trace.items()
    ]
