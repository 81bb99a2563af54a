"""A trace's line in lists of requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from components.telemetry.stored_spans import Span
from components.telemetry.trace_pieces import CLIENT_REQUEST_ID, MOVED, REFUSED, REQUEST_ID, ROUTE, SLOW, TENANT, TTFT

CANCELLED: Final = "kvmesh.cancelled"
MODEL: Final = "gen_ai.request.model"
DECODE_INSTANCE: Final = "kvmesh.decode.instance"
PREFILL_INSTANCE: Final = "kvmesh.prefill.instance"
DECODE_SPAN: Final = "decode.request"
WORKER_SPANS: Final = frozenset({DECODE_SPAN, "prefill.request"})
LOST_AFTER_S: Final = 60.0  # if the frontend's span is missing this long after decode's part ended, it was lost
FRONTEND_LOST: Final = "frontend lost: it left no span"
LONGEST_S: Final = 3600.0  # the same if decode's span is missing, too, because the request may still run

APIS: Final = {"/v1/responses": "responses", "/v1/messages": "messages"}  # their operation is "chat"

Status = Literal["ok", "running", "refused", "cancelled", "error"]  # refused: answered with 4xx


@dataclass(frozen=True, slots=True)
class TraceSummary:
    trace_id: str
    request_id: str  # ours; empty if the root was not kept
    client_request_id: str
    name: str
    model: str  # empty if unknown
    started_unix_s: float
    duration_s: float
    ttft_s: float | None  # None: no token was sent
    status: Status
    error: str  # empty: ok or running
    moved: bool
    slow: bool
    decode_ids: tuple[str, ...]  # in the order of use; several if the request moved
    prefill_ids: tuple[str, ...]
    num_spans: int
    tenant: str = ""  # empty without an API key


def root_of(spans: Sequence[Span]) -> Span:
    """The span of the HTTP request, else the first whose parent is not in `spans`."""
    known = {span.span_id for span in spans}
    tops = [span for span in spans if span.parent_id not in known] or list(spans)
    return next((span for span in tops if REQUEST_ID in span.attributes), tops[0])


def of_tenant(spans: Sequence[Span], tenant: str) -> list[Span]:
    """A client may put requests of several tenants into one trace."""
    by_id = {span.span_id: span for span in spans}
    return [span for span in spans if _tenant_of(span, by_id) == tenant]


def _tenant_of(span: Span, by_id: Mapping[str, Span]) -> str | None:
    """Return None if the request's root was not kept or had no API key."""
    at: Span | None = span
    for _ in range(len(by_id)):  # received spans may form a cycle
        if at is None or TENANT in at.attributes:
            break
        at = by_id.get(at.parent_id or "")
    return None if at is None or TENANT not in at.attributes else str(at.attributes[TENANT])


def summary_of(spans: Sequence[Span], now_s: float | None = None) -> TraceSummary:
    """`spans`: one or more of one trace, by start time.

    `now_s`: wall clock, if frontends keep their spans in the same place. A request without its frontend's span is then running,
    or its frontend was lost.
    """
    root = root_of(spans)
    status, error = _outcome(spans, root, now_s)
    ttft_s = root.attributes.get(TTFT)
    return TraceSummary(
        trace_id=root.trace_id,
        request_id=str(root.attributes.get(REQUEST_ID, "")),
        client_request_id=str(root.attributes.get(CLIENT_REQUEST_ID, "")),
        name=_name(root),
        model=str(root.attributes.get(MODEL, "")),
        started_unix_s=root.start_ns / 1e9,
        duration_s=(root.end_ns - root.start_ns) / 1e9,
        ttft_s=ttft_s if isinstance(ttft_s, float) else None,
        status=status,
        error=error,
        moved=MOVED in root.attributes or any(event.name == "moved" for span in spans for event in span.events),
        slow=SLOW in root.attributes,
        decode_ids=_instances(spans, DECODE_INSTANCE),
        prefill_ids=_instances(spans, PREFILL_INSTANCE),
        num_spans=len(spans),
        tenant=str(root.attributes.get(TENANT, "")),
    )


def _name(root: Span) -> str:
    operation, _, model = root.name.partition(" ")
    return f"{APIS.get(str(root.attributes.get(ROUTE)), operation)} {model}".rstrip()


def _outcome(spans: Sequence[Span], root: Span, now_s: float | None) -> tuple[Status, str]:
    if now_s is not None and REQUEST_ID not in root.attributes and any(span.name in WORKER_SPANS for span in spans):
        # a moved stream continues after a failed part
        has_ended = any(span.name == DECODE_SPAN and span.status != "ERROR" for span in spans)
        silent_s = now_s - max(span.end_ns for span in spans) / 1e9
        is_lost = silent_s > (LOST_AFTER_S if has_ended else LONGEST_S)
        return ("error", FRONTEND_LOST) if is_lost else ("running", "")
    if root.status == "ERROR":
        return "error", root.error or "failed"
    if CANCELLED in root.attributes:
        return "cancelled", str(root.attributes[CANCELLED])
    if REFUSED in root.attributes:
        return "refused", str(root.attributes[REFUSED])
    return "ok", ""


def _instances(spans: Sequence[Span], attribute: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(span.attributes[attribute]) for span in spans if attribute in span.attributes))
