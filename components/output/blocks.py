"""An answer cut into blocks: reasoning, text, calls, in the order in which they came. Two APIs tell of it that way."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, Self

from components.output.calls import Call, CallDelta

Kind = Literal["reasoning", "text", "call"]


class Block:
    """One of them, while it grows; `id` and `name` are a call's, whose text is its arguments."""

    __slots__ = ("_pieces", "id", "index", "kind", "name")

    def __init__(self, kind: Kind, index: int, call_id: str = "", name: str = "") -> None:
        self.kind = kind
        self.index = index  # among all blocks
        self.id = call_id
        self.name = name
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self._pieces)

    def add(self, text: str) -> None:
        """It grows."""
        self._pieces.append(text)


class Step(NamedTuple):
    """What happens next: a block ends, a block begins, a block grows by some text."""

    block: Block
    text: str = ""
    begins: bool = False
    ended: Block | None = None


class Blocks:
    """Every block of one answer; the last one is open. A call's deltas come one after another, as its index says."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._call = -1  # its index, when the open block is one

    @classmethod
    def of(cls, reasoning: str, text: str, calls: Sequence[Call]) -> Self:
        """Of a whole answer."""
        blocks = cls()
        for _ in blocks.feed(reasoning, text, [CallDelta(i, *call) for i, call in enumerate(calls)]):
            pass
        return blocks

    def feed(self, reasoning: str, text: str, calls: Sequence[CallDelta]) -> Iterator[Step]:
        """What a piece of the answer does to them, step by step."""
        if reasoning:
            yield self._grow("reasoning", reasoning)
        if text:
            yield self._grow("text", text)
        for call in calls:
            yield self._grow("call", call.arguments, call)

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
