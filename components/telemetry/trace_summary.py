"""What one trace says about its request, for lists of requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from components.telemetry.stored_spans import Span
from components.telemetry.trace_pieces import CLIENT_REQUEST_ID, MOVED, REQUEST_ID, SLOW, TENANT, TTFT

CANCELLED: Final = "kvmesh.cancelled"
MODEL: Final = "gen_ai.request.model"
DECODE_INSTANCE: Final = "kvmesh.decode.instance"
PREFILL_INSTANCE: Final = "kvmesh.prefill.instance"


@dataclass(frozen=True, slots=True)
class TraceSummary:
    trace_id: str
    request_id: str  # ours; empty if the root is not kept
    client_request_id: str  # the client's own; empty without one
    name: str
    model: str  # empty if unknown, as for a refused request
    started_unix_s: float
    duration_s: float
    ttft_s: float | None  # None: no token was sent
    status: Literal["ok", "error", "cancelled"]
    error: str  # empty if status is ok
    moved: bool
    slow: bool
    decode_ids: tuple[str, ...]  # instances in the order of their use; several if the request moved
    prefill_ids: tuple[str, ...]
    num_spans: int
    tenant: str = ""  # of the API key; empty: the request came without one


def root_of(spans: Sequence[Span]) -> Span:
    """The span of the HTTP request, else the first span that has no parent here."""
    known = {span.span_id for span in spans}
    tops = [span for span in spans if span.parent_id not in known] or list(spans)
    return next((span for span in tops if REQUEST_ID in span.attributes), tops[0])


def of_tenant(spans: Sequence[Span], tenant: str) -> list[Span]:
    """The spans of the tenant's own requests. A client may put requests of several tenants into one trace."""
    by_id = {span.span_id: span for span in spans}
    return [span for span in spans if _tenant_of(span, by_id) == tenant]


def _tenant_of(span: Span, by_id: Mapping[str, Span]) -> str | None:
    """That of the nearest request around `span`; None if that is not kept, or came without an API key."""
    at: Span | None = span
    for _ in range(len(by_id)):  # a receiver's spans may form a ring
        if at is None or TENANT in at.attributes:
            break
        at = by_id.get(at.parent_id or "")
    return None if at is None or TENANT not in at.attributes else str(at.attributes[TENANT])


def summary_of(spans: Sequence[Span]) -> TraceSummary:
    """`spans`: of one trace, by start time; at least one."""
    root = root_of(spans)
    cancelled = root.attributes.get(CANCELLED)
    failed = root.status == "ERROR"
    ttft_s = root.attributes.get(TTFT)
    return TraceSummary(
        trace_id=root.trace_id,
        request_id=str(root.attributes.get(REQUEST_ID, "")),
        client_request_id=str(root.attributes.get(CLIENT_REQUEST_ID, "")),
        name=root.name,
        model=str(root.attributes.get(MODEL, "")),
        started_unix_s=root.start_ns / 1e9,
        duration_s=(root.end_ns - root.start_ns) / 1e9,
        ttft_s=ttft_s if isinstance(ttft_s, float) else None,
        status="error" if failed else "ok" if cancelled is None else "cancelled",
        error=(root.error or "failed") if failed else str(cancelled or ""),
        moved=MOVED in root.attributes or any(event.name == "moved" for span in spans for event in span.events),
        slow=SLOW in root.attributes,
        decode_ids=_instances(spans, DECODE_INSTANCE),
        prefill_ids=_instances(spans, PREFILL_INSTANCE),
        num_spans=len(spans),
        tenant=str(root.attributes.get(TENANT, "")),
    )


def _instances(spans: Sequence[Span], attribute: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(span.attributes[attribute]) for span in spans if attribute in span.attributes))
