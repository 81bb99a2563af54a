"""frontend → all: which traces to keep, on the subject `<namespace>.traces.keep`."""

from components.wire.codec import Struct, message


@message("traces-keep.v1")
class KeepTraces(Struct):
    """Unanswered. A process exports the spans that it holds of these traces, and later ones."""

    trace_ids: bytes  # 16 each, big-endian
