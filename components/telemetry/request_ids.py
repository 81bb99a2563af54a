"""The ids of the request that the current task works for, in each of its log lines."""

import logging
from contextvars import ContextVar
from typing import Final

from opentelemetry import trace

request_id: Final[ContextVar[str]] = ContextVar("request_id", default="")  # tasks and timers inherit it


class RequestIds(logging.Filter):
    """Adds `request_id`, and `trace_id` if the request is traced. Ids in a line's own facts win.

    A filter, since it runs where the line is logged: a line that is held back is written by another thread.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        facts = record.__dict__
        if "request_id" not in facts and (name := request_id.get()):
            facts["request_id"] = name
        if "trace_id" not in facts:
            span = trace.get_current_span().get_span_context()
            if span.is_valid:
                facts["trace_id"] = trace.format_trace_id(span.trace_id)
        return True
