"""An answer as blocks of reasoning, text and calls: the form of the Responses and Messages APIs."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from components.output.calls import CallDelta

Kind = Literal["reasoning", "text", "call"]


class Block:
    """`id` and `name` are set for a call, whose text is its arguments."""

    __slots__ = ("_pieces", "id", "index", "kind", "name")

    def __init__(self, kind: Kind, index: int, call_id: str = "", name: str = "") -> None:
        self.kind = kind
        self.index = index  # position among all blocks
        self.id = call_id
        self.name = name
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, text: str) -> None:
        self._pieces.append(text)


class Step(NamedTuple):
    block: Block
    text: str = ""
    begins: bool = False
    ended: Block | None = None


class Blocks:
    """An answer's blocks, of which the last is open. A call's deltas are consecutive."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._call = -1  # -1: none is open

    def feed(self, reasoning: str, text: str, calls: Sequence[CallDelta]) -> Iterator[Step]:
        rest = 0  # deltas of the open call precede all other new text
        while rest < len(calls) and calls[rest].index == self._call:
            yield self._grow("call", calls[rest].arguments, calls[rest])
            rest += 1
        if reasoning:
            yield self._grow("reasoning", reasoning)
        if text:
            yield self._grow("text", text)
        for call in calls[rest:]:
            yield self._grow("call", call.arguments, call)

    def add(self, reasoning: str, text: str, calls: Sequence[CallDelta]) -> None:
        for _ in self.feed(reasoning, text, calls):
            pass

    def _grow(self, kind: Kind, text: str, call: CallDelta | None = None) -> Step:
        ended = self.all[-1] if self.all else None
        index = -1 if call is None else call.index
        if ended is not None and ended.kind == kind and index == self._call:
            ended.add(text)
            return Step(ended, text)
        block = Block(kind, len(self.all), (call and call.id) or "", (call and call.name) or "")
        block.add(text)
        self.all.append(block)
        self._call = index
        return Step(block, text, begins=True, ended=ended)
