"""One generated text taken apart: what the model thinks, what it says, which tools it calls."""

from collections.abc import Sequence
from typing import NamedTuple

from components.output.calls import CallDelta
from components.output.reader import Reader
from components.output.reasoning import Reasoning


class Parsed(NamedTuple):
    """What is new of each."""

    text: str
    reasoning: str
    calls: Sequence[CallDelta]


class OutputParser:
    """Reasoning first, then the answer with calls in it; either may be left out. How the text is cut makes no difference."""

    __slots__ = ("_calls", "_reasoning")

    def __init__(self, reasoning: Reasoning | None, calls: Reader | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    @property
    def done(self) -> bool:
        """Nothing that follows is of interest: the one call that was wanted is there."""
        return self._calls is not None and self._calls.done

    @property
    def called(self) -> bool:
        """Whether there are calls, none of which is cut off."""
        return self._calls is not None and self._calls.num_calls > 0 and not self._calls.calling

    def feed(self, text: str) -> Parsed:
        """Take more text."""
        thought = ""
        if self._reasoning is not None:
            thought, text = self._reasoning.feed(text)
        if self._calls is None or not text:
            return Parsed(text, thought, ())
        said, calls = self._calls.feed(text)
        return Parsed(said, thought, calls)

    def flush(self) -> Parsed:
        """What was held back: the text is over."""
        thought = text = ""
        if self._reasoning is not None:
            thought, text = self._reasoning.flush()
        if self._calls is None:
            return Parsed(text, thought, ())
        said, calls = self._calls.feed(text)
        more, last = self._calls.end()
        return Parsed(said + more, thought, [*calls, *last])
