"""Server-sent events of a response, and the output items of an answer."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel

from components.openai.events import as_json, quote
from components.openai.items import (
    OutputCall,
    OutputCustomCall,
    OutputItem,
    OutputMessage,
    OutputPart,
    OutputReasoning,
    OutputThought,
    Status,
)
from components.openai.logprobs import TokenLogprob
from components.openai.response_tools import Callee, input_of
from components.openai.responses import ResponseObject
from components.output.blocks import Block, Blocks
from components.output.calls import CallDelta

NO_TOOLS: Final[Mapping[str, Callee]] = {}
PREFIXES: Final = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}
DELTAS: Final = {
    "reasoning": "response.reasoning_text.delta",
    "text": "response.output_text.delta",
    "call": "response.function_call_arguments.delta",
}


def item_id(block: Block, request_id: str) -> str:
    return f"{PREFIXES[block.kind]}{request_id}{block.index:02d}"


def response_of(item_id: str) -> str:
    return f"resp_{item_id.partition('_')[2][:32]}"


def item_of(
    block: Block,
    request_id: str,
    status: Status,
    logprobs: Sequence[TokenLogprob] = (),
    callees: Mapping[str, Callee] = NO_TOOLS,
) -> OutputItem:
    """`callees`: the tools by their names for the model."""
    own = item_id(block, request_id)
    if block.kind == "call":
        callee = callees.get(block.name, Callee(block.name))
        call: dict[str, Any] = {"id": own, "status": status, "call_id": block.id}
        call |= {"name": callee.name, "namespace": callee.namespace}
        if callee.custom:
            return OutputCustomCall(**call, input=input_of(block.text))
        return OutputCall(**call, arguments=block.text)
    if block.kind == "reasoning":
        return OutputReasoning(id=own, status=status, content=[OutputThought(text=block.text)] if block.text else [])
    part = OutputPart(text=block.text, logprobs=[token.model_dump() for token in logprobs])
    return OutputMessage(id=own, status=status, content=[part] if block.text or status != "in_progress" else [])


class ResponseEvents:
    """One stream, with numbered events."""

    def __init__(self, request_id: str, callees: Mapping[str, Callee] = NO_TOOLS) -> None:
        self._callees = callees
        self.blocks = Blocks()
        self.items: list[OutputItem] = []
        self._request_id = request_id
        self._number = 0
        self._head = b""  # of the open block's event, from its number to the text
        self._logprobs: list[TokenLogprob] = []  # of the open block

    def begin(self, response: ResponseObject) -> bytes:
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def piece(
        self, reasoning: str, text: str, calls: Sequence[CallDelta], logprobs: Sequence[TokenLogprob] = ()
    ) -> bytes:
        data = b""
        for block, new, begins, ended in self.blocks.feed(reasoning, text, calls):
            if ended is not None:
                data += self._close(ended, "completed")
            if begins:
                data += self._open(block)
            if new:
                data += self._delta(block, new, logprobs if block.kind == "text" else ())
        return data

    def end(self, status: Status, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        """Events that end the last item. An answer without text has one empty message."""
        data = b""
        if not self.blocks.all:
            block = Block("text", 0)
            self.blocks.all.append(block)
            data = self._open(block)
        self._logprobs += logprobs
        return data + self._close(self.blocks.all[-1], status)

    def last(self, kind: str, response: ResponseObject) -> bytes:
        return self._event(f"response.{kind}", response=response)

    def error(self, code: str, message: str) -> bytes:
        return self._event("error", code=code, message=message, param=None)

    def _open(self, block: Block) -> bytes:
        at: dict[str, Any] = {"item_id": item_id(block, self._request_id), "output_index": block.index}
        begun = Block(block.kind, block.index, block.id, block.name)
        empty = item_of(begun, self._request_id, "in_progress", callees=self._callees)
        data = self._event("response.output_item.added", output_index=block.index, item=empty)
        if block.kind != "call":
            at["content_index"] = 0
            data += self._event("response.content_part.added", **at, part=_part(block.kind, ""))
        body = b"".join(b'"%b":%b,' % (name.encode(), as_json(value)) for name, value in at.items())
        kind = DELTAS[block.kind].encode()
        self._head = b'event: %b\ndata: {"type":"%b",%b"sequence_number":' % (kind, kind, body)
        self._logprobs = []
        return data

    def _delta(self, block: Block, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        if block.kind == "call" and self._is_custom(block):
            return b""  # its input is sent as a whole, because the model writes it as JSON
        shown_logprobs = b""
        if block.kind == "text":
            self._logprobs += logprobs
            shown_logprobs = b',"logprobs":[%b]' % b",".join(as_json(token) for token in logprobs)
        self._number += 1
        return b'%b%d,"delta":%b%b}\n\n' % (self._head, self._number - 1, quote(text), shown_logprobs)

    def _close(self, block: Block, status: Status) -> bytes:
        item = item_of(block, self._request_id, status, self._logprobs, self._callees)
        self.items.append(item)
        at: dict[str, Any] = {"item_id": item.id, "output_index": block.index}
        if isinstance(item, OutputCustomCall):
            data = self._event("response.custom_tool_call_input.delta", **at, delta=item.input)
            data += self._event("response.custom_tool_call_input.done", **at, input=item.input)
        elif isinstance(item, OutputCall):
            data = self._event("response.function_call_arguments.done", **at, name=item.name, arguments=block.text)
        elif block.kind == "reasoning":
            data = self._event("response.reasoning_text.done", **at, content_index=0, text=block.text)
        else:
            logprobs = [token.model_dump() for token in self._logprobs]
            data = self._event("response.output_text.done", **at, content_index=0, text=block.text, logprobs=logprobs)
        if block.kind != "call":
            part = _part(block.kind, block.text, self._logprobs)
            data += self._event("response.content_part.done", **at, content_index=0, part=part)
        return data + self._event("response.output_item.done", output_index=block.index, item=item)

    def _is_custom(self, block: Block) -> bool:
        callee = self._callees.get(block.name)
        return callee is not None and callee.custom

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = b"".join(b',"%b":%b' % (name.encode(), as_json(value)) for name, value in fields.items())
        self._number += 1
        name = kind.encode()
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d%b}\n\n' % (name, name, self._number - 1, body)


def _part(kind: str, text: str, logprobs: Sequence[TokenLogprob] = ()) -> BaseModel:
    if kind == "reasoning":
        return OutputThought(text=text)
    return OutputPart(text=text, logprobs=[token.model_dump() for token in logprobs])
