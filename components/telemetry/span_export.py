"""Exports finished spans on a thread: to this host's file, to an OTLP receiver, or to both.

An observer has its own file, so the host's is not written once one has answered.
"""

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from components.telemetry.light_span import LightSpan
from components.telemetry.otlp_encoder import encode_request, encode_resource, encode_whole
from components.telemetry.otlp_sender import OTLP, OtlpSender
from components.telemetry.packed_spans import pack_spans
from components.telemetry.trace_pieces import PIECES, REQUEST_ID, Piece, Pieces, Root, pack_pieces
from components.telemetry.trace_store import TraceWriter

log = logging.getLogger(__name__)

EVERY_S: Final = 0.5  # so that `inspect trace last` shows the latest request
BATCH: Final = 256  # requests per export, with all their spans; about 400 KB
MAX_WAITING: Final = 4096  # queued requests; more are dropped and counted
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
        self._too_many = 0  # spans; the queue was full
        self._unwritten = 0  # spans
        self._thread = threading.Thread(target=self._run, name="span-export", daemon=True)

    def is_observed(self) -> bool | None:
        """None: no answer yet."""
        return self._sender is not None and self._sender.is_observer

    def takes_metrics(self) -> bool | None:
        """An observer accepts none. None: no answer yet."""
        is_observed = self.is_observed()
        return None if is_observed is None else not is_observed

    @property
    def dropped(self) -> Mapping[str, int]:
        """Spans by cause. Those of `receiver_*` may still be in the file."""
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
        """Export the queued spans, within STOP_S."""
        self._stopping.set()
        self._thread.join(STOP_S)

    def put(self, span: LightSpan) -> None:
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(span)
        else:
            self._too_many += 1 + len(span.steps)

    def _run(self) -> None:
        dropped = 0
        if self._sender is not None:
            self._sender.greet()
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
            self.export()
        except Exception:
            log.exception("spans not exported")  # the next batch may succeed

    def export(self) -> None:
        """Runs on the export thread."""
        while batch := [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]:
            sender, traces = self._sender, by_trace(batch)
            num_spans = sum(1 + len(span.steps) for span in batch)
            if sender is not None and sender.takes_pieces:
                sender.send(pack_pieces(Pieces(self._service, pieces_of(traces))), PIECES, num_spans)
            elif sender is not None:
                scopes = (b"".join([encode_whole(span) for span in found]) for found in traces)
                sender.send(encode_request(self._resource, scopes), OTLP, num_spans)
            if not self.is_observed() and not self._file.write(self._service, pieces_of(traces)):
                self._unwritten += num_spans
        if self._sender is not None:
            self._sender.send_waiting()


def by_trace(spans: Sequence[LightSpan]) -> list[list[LightSpan]]:
    """Group spans by trace, so that the observer need not."""
    found: dict[int, list[LightSpan]] = defaultdict(list)
    for span in spans:
        found[span.trace_id].append(span)
    return list(found.values())


def pieces_of(traces: Sequence[Sequence[LightSpan]]) -> list[Piece]:
    """`traces`: the spans of each, with their descendants."""
    pieces = []
    for found in traces:
        num_spans, packed = pack_spans(found)
        roots = [
            Root.of(span.start_time, span.attributes, failed=not span.status.is_ok)
            for span in found
            if REQUEST_ID in span.attributes
        ]
        start_ns = min([span.start_time for span in found])
        pieces.append(Piece(f"{found[0].trace_id:032x}", start_ns, num_spans, packed, roots))
    return pieces
