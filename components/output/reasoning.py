"""Separates a model's reasoning from its answer."""

from collections.abc import Callable
from typing import Final, NamedTuple

from components.output.reader import SPACES, Reader, beginning

THINK: Final = ("<think>", "</think>")
MISTRAL_THINK: Final = ("[THINK]", "[/THINK]")


class Thought(NamedTuple):
    reasoning: str
    text: str


class CallsWithin(NamedTuple):
    """Calls that end the reasoning, because some models write them without `end` before."""

    marker: str  # the beginning of a call
    reader: Callable[[], Reader]  # makes a reader of such calls


class Reasoning:
    """Reasoning between two markers, then the answer, both without surrounding spaces.

    If the first marker is missing, there is no reasoning, unless the prompt ends with that marker.
    """

    __slots__ = (
        "_begin",
        "_calls",
        "_closed",
        "_end",
        "_has_reported",
        "_held",
        "_inside",
        "_opened",
        "_trial",
        "over",
    )

    def __init__(self, begin: str, end: str, *, opened: bool, calls: CallsWithin | None = None) -> None:
        """`opened`: the prompt ends with `begin`."""
        self.over = False  # all further text is answer
        self._begin = begin
        self._end = end
        self._opened = opened
        self._calls = calls
        self._trial: tuple[Reader, int] | None = (
            None  # reader of what may become a call, and the characters that it has
        )
        self._closed = True  # False: a call ended the reasoning, and `end` may follow it
        self._inside: bool | None = None  # None: undecided
        self._held = ""
        self._has_reported = False  # some reasoning, or once `over` some answer, was reported

    @property
    def inside(self) -> bool:
        return bool(self._inside) and not self.over

    @property
    def found(self) -> bool:
        return bool(self._inside)

    @property
    def held(self) -> str:
        return self._held

    def feed(self, text: str) -> Thought:
        if self.over:
            return Thought("", self._answer(text))
        self._held += text
        if self._inside is None:
            head = self._held.lstrip(SPACES)
            if self._begin.startswith(head):
                return Thought("", "")
            again = head.startswith(self._begin)  # some models repeat the marker that ended the prompt
            self._inside = again or self._opened
            if again:
                self._held = head[len(self._begin) :]
        return self._think() if self._inside else self._no_reasoning()

    def flush(self) -> Thought:
        if not (self.over or self._inside or (self._inside is None and self._opened)):
            return self._no_reasoning()
        held, self._held = self._held, ""
        if self.over:
            return Thought("", held)
        return Thought((held if self._has_reported else held.lstrip(SPACES)).rstrip(SPACES), "")

    def _no_reasoning(self) -> Thought:
        self.over = self._has_reported = True
        held, self._held = self._held, ""
        return Thought("", held)

    def _think(self) -> Thought:
        held = self._held if self._has_reported else self._held.lstrip(SPACES)
        thought, end, text = held.partition(self._end)
        sure = thought if end else thought[: len(thought) - beginning(thought, 0, [self._end])]
        at, called = self._call_in(sure)
        if called:
            thought, text, self._closed = held[:at], held[at:], False
        if end or called:
            self.over, self._has_reported, self._held = True, False, ""
            return Thought(thought.rstrip(SPACES), self._answer(text))
        shown = sure[:at].rstrip(SPACES)
        self._has_reported = self._has_reported or bool(shown)
        self._held = held[len(shown) :]
        return Thought(shown, "")

    def _call_in(self, thought: str) -> tuple[int, bool]:
        """Length of the text before the first call, or what may become one, and whether it is one.

        A marker without a call of an offered tool belongs to the thought.
        """
        if self._calls is None:
            return len(thought), False
        marker, new_reader = self._calls
        at = thought.find(marker)
        while at >= 0:
            reader, num_read = self._trial or (new_reader(), 0)
            parts = (found for char in thought[at + num_read :] if (found := reader.feed(char)).calls or found.text)
            first = next(parts, None)
            self._trial = (reader, len(thought) - at) if first is None else None
            if first is None:
                return at, False
            if first.calls and first.calls[0].name in reader.tools:
                return at, True
            at = thought.find(marker, at + len(marker))
        return len(thought) - beginning(thought, 0, [marker]), False

    def _answer(self, text: str) -> str:
        if not self._closed:
            text, end, rest = (self._held + text).partition(self._end)
            self._closed = bool(end)
            shown = len(text) - (0 if end else beginning(text, 0, [self._end]))
            text, self._held = text[:shown] + rest, text[shown:]
        if not self._has_reported:
            text = text.lstrip(SPACES)
            self._has_reported = bool(text)
        return text
