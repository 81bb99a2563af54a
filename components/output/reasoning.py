"""Separates a model's reasoning from its answer."""

from typing import Final, NamedTuple

from components.output.reader import SPACES, beginning

THINK: Final = ("<think>", "</think>")
MISTRAL_THINK: Final = ("[THINK]", "[/THINK]")


class Thought(NamedTuple):
    reasoning: str
    text: str


class Reasoning:
    """Reasoning between two markers, then the answer, both without surrounding spaces.

    If the first marker is missing, there is no reasoning, unless the prompt ends with that marker.
    """

    __slots__ = ("_begin", "_end", "_has_reported", "_held", "_inside", "_opened", "over")

    def __init__(self, begin: str, end: str, *, opened: bool) -> None:
        """`opened`: the prompt ends with `begin`."""
        self.over = False  # whether all further text is answer
        self._begin = begin
        self._end = end
        self._opened = opened
        self._inside: bool | None = None  # None: undecided
        self._held = ""
        self._has_reported = False  # whether some reasoning, or once `over` some answer, was reported

    @property
    def inside(self) -> bool:
        return bool(self._inside) and not self.over

    @property
    def found(self) -> bool:
        """Whether the text has reasoning."""
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
        if self.over:
            return Thought("", "")
        if not (self._inside or (self._inside is None and self._opened)):
            return self._no_reasoning()
        held, self._held = self._held, ""
        return Thought((held if self._has_reported else held.lstrip(SPACES)).rstrip(SPACES), "")

    def _no_reasoning(self) -> Thought:
        self.over = self._has_reported = True
        held, self._held = self._held, ""
        return Thought("", held)

    def _think(self) -> Thought:
        held = self._held if self._has_reported else self._held.lstrip(SPACES)
        thought, end, text = held.partition(self._end)
        if end:
            self.over, self._has_reported, self._held = True, False, ""
            return Thought(thought.rstrip(SPACES), self._answer(text))
        shown = held[: len(held) - beginning(held, 0, [self._end])].rstrip(SPACES)
        self._has_reported = self._has_reported or bool(shown)
        self._held = held[len(shown) :]
        return Thought(shown, "")

    def _answer(self, text: str) -> str:
        if not self._has_reported:
            text = text.lstrip(SPACES)
            self._has_reported = bool(text)
        return text
