"""Stop strings across token boundaries."""

from collections.abc import Sequence


class StopStrings:
    """The result does not depend on how the text is cut. The longest of several stop strings with one end counts."""

    __slots__ = ("_failure", "_held", "_included", "_matched", "_stops", "found")

    def __init__(self, stops: Sequence[str], *, included: bool = False) -> None:
        """`included`: show the stop string that ends the text."""
        self._included = included
        self._stops = sorted(stops, key=len, reverse=True)  # longest first: it begins earliest
        self._failure = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # for each, its longest prefix that ends the text so far
        self._held = ""
        self.found: str | None = None  # the one that ended the text

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that is safe to show, and whether a stop string is complete."""
        unseen = len(self._held)
        self._held += text
        for position in range(unseen, len(self._held)):
            length = self._step(self._held[position])
            if length:
                return self._held[: position + 1 - (0 if self._included else length)], True
        safe = len(self._held) - max(self._matched, default=0)
        shown, self._held = self._held[:safe], self._held[safe:]
        return shown, False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> int:
        """The length of the completed stop string, or 0. Source: Knuth, Morris and Pratt, 1977."""
        for i, stop in enumerate(self._stops):
            length = self._matched[i]
            while length and stop[length] != char:
                length = self._failure[i][length - 1]
            if stop[length] == char:
                length += 1
            if length == len(stop):
                self.found = stop
                return length
            self._matched[i] = length
        return 0


def _failure_table(stop: str) -> list[int]:
    table = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[length] != stop[i]:
            length = table[length - 1]
        if stop[length] == stop[i]:
            length += 1
        table[i] = length
    return table
