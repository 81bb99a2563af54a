"""Server-sent events of a message, content blocks of an answer, and errors."""

from collections.abc import Sequence
from math import isfinite
from typing import Any, Final

from pydantic_core import from_json

from components.anthropic.messages import NO_THREADS, AppliedEdits, MessageObject, MessageUsage, StopReason
from components.openai.errors import ApiError
from components.openai.events import as_json, quote
from components.output.blocks import Block, Blocks
from components.output.calls import CallDelta

OVERLOADED: Final = 529  # Anthropic's own status, after which its clients retry
TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'
STOP: Final = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
DELTAS: Final = {
    "text": b'"type":"text_delta","text":',
    "reasoning": b'"type":"thinking_delta","thinking":',
    "call": b'"type":"input_json_delta","partial_json":',
}


def content_of(block: Block) -> dict[str, Any]:
    """The content block of a finished block."""
    if block.kind == "call":
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": _input(block.text)}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments, even if cut off; as text if they are not a JSON object."""
    try:
        read = from_json(arguments or "{}", allow_partial=True, allow_inf_nan=False)
    except ValueError:
        read = None
    if isinstance(read, dict) and _is_finite(read):
        return read
    return {"": arguments}


def _is_finite(value: Any) -> bool:
    """Return whether all numbers in `value` are finite, because JSON has no infinity."""
    if isinstance(value, float):
        return isfinite(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(map(_is_finite, inner))


class MessageEvents:
    def __init__(self) -> None:
        self.blocks = Blocks()

    def begin(self, message: MessageObject) -> bytes:
        return b'event: message_start\ndata: {"type":"message_start","message":%b}\n\n%b' % (as_json(message), PING)

    def piece(self, reasoning: str, text: str, calls: Sequence[CallDelta]) -> bytes:
        data = b""
        for block, new, begins, ended in self.blocks.feed(reasoning, text, calls):
            if ended is not None:
                data += _stop(ended)
            if begins:
                data += _start(block)
            if new:
                data += (
                    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{%b%b}}\n\n'
                    % (
                        block.index,
                        DELTAS[block.kind],
                        quote(new),
                    )
                )
        return data

    def end(
        self, reason: StopReason, sequence: str | None, usage: MessageUsage, edits: AppliedEdits | None = None
    ) -> bytes:
        event = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": usage.model_dump(),
        }
        if edits is not None:
            event["context_management"] = edits.model_dump()
        last = _stop(self.blocks.all[-1]) if self.blocks.all else b""
        return b"%bevent: message_delta\ndata: %b\n\n%b" % (last, as_json(event), STOP)


def _start(block: Block) -> bytes:
    empty = as_json(content_of(Block(block.kind, block.index, block.id, block.name)))
    return b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,"content_block":%b}\n\n' % (
        block.index,
        empty,
    )


def _stop(block: Block) -> bytes:
    return b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n' % block.index


def status_of(error: ApiError) -> int:
    """Errors are converted from OpenAI's, so that one table maps all causes."""
    return OVERLOADED if error.status == 503 else error.status


def body_of(error: ApiError, request_id: str) -> bytes:
    """The JSON of a failed request, or of an event that ends a stream."""
    status = status_of(error)
    kind = TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    inner: dict[str, Any] = {"type": kind, "message": error.message}
    if error.code == NO_THREADS:
        inner["details"] = {"error_code": error.code}
    return as_json({"type": "error", "error": inner, "request_id": f"req_{request_id}"})
