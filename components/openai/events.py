"""Server-sent events of one stream, as bytes. Constant parts are serialised once."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from pydantic import BaseModel

from components.openai.fields import Usage
from components.output.calls import CallDelta

DONE: Final = b"data: [DONE]\n\n"

_encode: Final = json.JSONEncoder(ensure_ascii=False).encode
# line breaks for str.splitlines, which some clients use, but not in JSON
_LINE_ENDS: Final = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def quote(text: str) -> bytes:
    """`text` as a JSON string without line breaks."""
    return _in_one_line(_encode(text))


def as_json(value: object) -> bytes:
    return _in_one_line(value.model_dump_json() if isinstance(value, BaseModel) else _encode(value))


def _in_one_line(json_text: str) -> bytes:
    return (json_text if json_text.isascii() else json_text.translate(_LINE_ENDS)).encode()


def member(name: str, value: str) -> bytes:
    """`,"name":value`; `value` is JSON."""
    return b',"%b":%b' % (name.encode(), value.encode())


class More(NamedTuple):
    """Optional members of an event: of its choice, and of the chunk."""

    choice: bytes = b""
    chunk: bytes = b""
    usage: bytes = b""  # of each chunk


NOTHING: Final = More()


@dataclass(frozen=True, slots=True)
class Events:
    """The events of one stream. Chats and completions differ only in what is around the text."""

    head: bytes  # start of an event, up to the choice's index
    before_text: bytes
    after_text: bytes
    empty: bytes  # a choice without text, for the finish event
    opening: bytes | None  # a choice before any text
    usage_head: bytes

    @classmethod
    def chat(cls, response_id: str, created: int, model: str, *, usage_follows: bool, empty: bool = True) -> Self:
        """`empty`: the content begins as "", not as null."""
        head, usage_head = _heads(response_id, "chat.completion.chunk", created, model, usage_follows=usage_follows)
        opening = b',"delta":{"role":"assistant","content":%b}' % (b'""' if empty else b"null")
        return cls(head, b',"delta":{"content":', b"}", b',"delta":{}', opening, usage_head)

    @classmethod
    def completion(cls, response_id: str, created: int, model: str, *, usage_follows: bool) -> Self:
        head, usage_head = _heads(response_id, "text_completion", created, model, usage_follows=usage_follows)
        return cls(head, b',"text":', b"", b',"text":""', None, usage_head)

    def open(self, index: int, more: More = NOTHING) -> bytes:
        """The event before a choice's text: in a chat, its role."""
        return b"" if self.opening is None else self._event(index, self.opening, b"null", more)

    def text(self, index: int, text: str, logprobs: BaseModel | None = None, more: More = NOTHING) -> bytes:
        return b'%b%d%b%b%b,"logprobs":%b,"finish_reason":null%b}]%b%b}\n\n' % (
            self.head,
            index,
            self.before_text,
            quote(text),
            self.after_text,
            b"null" if logprobs is None else as_json(logprobs),
            *more,
        )

    def parts(
        self,
        index: int,
        text: str,
        reasoning: str,
        calls: Sequence[CallDelta],
        *,
        logprobs: BaseModel | None = None,
        more: More = NOTHING,
    ) -> bytes:
        """Events for a chat's text, reasoning and calls; the first has the log-probabilities."""
        deltas = [b'"content":%b' % quote(text)] if text else []
        if reasoning:
            quoted = quote(reasoning)
            deltas.insert(0, b'"reasoning_content":%b,"reasoning":%b' % (quoted, quoted))
        deltas += [b'"tool_calls":[%b]' % _call(delta) for delta in calls]
        shown_logprobs = [b"null" if logprobs is None else as_json(logprobs)]
        shown_logprobs += [b"null"] * (len(deltas) - 1)
        mores = [more, *[More(usage=more.usage)] * (len(deltas) - 1)]
        return b"".join(
            b'%b%d,"delta":{%b},"logprobs":%b,"finish_reason":null%b}]%b%b}\n\n'
            % (self.head, index, delta, shown, *own)
            for delta, shown, own in zip(deltas, shown_logprobs, mores, strict=True)
        )

    def finish(self, index: int, reason: str, more: More = NOTHING) -> bytes:
        return self._event(index, self.empty, quote(reason), more)

    def usage(self, usage: Usage) -> bytes:
        """The usage chunk, which has no choices."""
        return b'%b[],"usage":%b}\n\n' % (self.usage_head, usage.model_dump_json().encode())

    def _event(self, index: int, payload: bytes, reason: bytes, more: More) -> bytes:
        return b'%b%d%b,"logprobs":null,"finish_reason":%b%b}]%b%b}\n\n' % (self.head, index, payload, reason, *more)


def _call(delta: CallDelta) -> bytes:
    arguments = quote(delta.arguments)
    if delta.id is None or delta.name is None:
        return b'{"index":%d,"function":{"arguments":%b}}' % (delta.index, arguments)
    return b'{"index":%d,"id":%b,"type":"function","function":{"name":%b,"arguments":%b}}' % (
        delta.index,
        quote(delta.id),
        quote(delta.name),
        arguments,
    )


def _heads(response_id: str, kind: str, created: int, model: str, *, usage_follows: bool) -> tuple[bytes, bytes]:
    common = b'data: {"id":%b,"object":%b,"created":%d,"model":%b,"system_fingerprint":null,' % (
        quote(response_id),
        quote(kind),
        created,
        quote(model),
    )
    usage = b'"usage":null,' if usage_follows else b""  # OpenAI: all chunks have the field if the last has usage
    return common + usage + b'"choices":[{"index":', common + b'"choices":'
