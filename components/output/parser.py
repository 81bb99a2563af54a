"""Splits a generated text into reasoning, answer and tool calls."""

from components.output.reader import NOTHING, Parsed, Reader
from components.output.reasoning import Reasoning


class OutputParser:
    """Parses a text in pieces. The result does not depend on their boundaries."""

    __slots__ = ("_calls", "_reasoning")

    def __init__(self, reasoning: Reasoning | None, calls: Reader | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    @property
    def done(self) -> bool:
        """Return whether no more text is needed, because only one call was requested and is complete."""
        return self._calls is not None and self._calls.done

    @property
    def called(self) -> bool:
        return self._calls is not None and self._calls.num_calls > 0 and not self._calls.calling

    @property
    def has_thought(self) -> bool:
        if self._reasoning is None:
            return self._calls is not None and self._calls.has_thought
        return self._reasoning.found

    @property
    def answers(self) -> bool:
        """Return whether reasoning is over, if the model's format has it before the answer."""
        return self._reasoning is not None and self._reasoning.over

    @property
    def held(self) -> str:
        """The end of the text that is held back, because only later text can decide what it is."""
        if self._reasoning is not None and not self._reasoning.over:
            return self._reasoning.held
        after = "" if self._reasoning is None else self._reasoning.held
        return after if self._calls is None else self._calls.held + after

    @property
    def undecided(self) -> bool:
        """Return whether the text ends within a call, or within a possible call or marker."""
        return bool(self.held.strip()) or (self._calls is not None and self._calls.calling)

    def begin(self) -> Parsed:
        """Parse the text before the continuation, if any."""
        return NOTHING

    def feed(self, text: str) -> Parsed:
        thought = ""
        if self._reasoning is not None:
            thought, text = self._reasoning.feed(text)
        if self._calls is None or not text:
            return Parsed(text, thought, ())
        answer, more, calls = self._calls.feed(text)
        return Parsed(answer, thought + more, calls)

    def flush(self) -> Parsed:
        """End the text and return the held parts."""
        thought = text = ""
        if self._reasoning is not None:
            thought, text = self._reasoning.flush()
        if self._calls is None:
            return Parsed(text, thought, ())
        return Parsed.joined([Parsed("", thought, ()), self._calls.feed(text), self._calls.end()])


class ContinuingParser(OutputParser):
    """Parses the continuation of an earlier text, which `begin` parses.

    Without `reports_before`, the earlier text is not reported, except a call within which it ends.
    """

    __slots__ = ("_before", "_earlier", "_known", "_reports_before", "_unreported")

    def __init__(self, reasoning: Reasoning | None, calls: Reader | None, before: str, *, reports_before: bool) -> None:
        super().__init__(reasoning, calls)
        self._unreported = NOTHING  # parts of `before` to report later
        self._before = before
        self._reports_before = reports_before
        self._known = ""  # held end of `before`, not new when it is reported
        self._earlier = 0  # complete calls in `before`

    @property
    def called(self) -> bool:
        """Earlier complete calls count only if they are reported."""
        return super().called and self._calls is not None and self._calls.num_calls > self._earlier

    def begin(self) -> Parsed:
        before = super().feed(self._before)
        self._unreported = before
        if not self._reports_before:
            self._known = self.held
            if self._calls is not None:
                self._earlier = self._calls.num_calls - int(self._calls.calling)
            self._unreported = Parsed("", "", [delta for delta in before.calls if delta.index >= self._earlier])
        return before

    def feed(self, text: str) -> Parsed:
        parts, at = [], 0
        while self._known and at < len(text):  # one by one, because text after a call or a marker is new
            parts.append(self._new(super().feed(text[at])))
            at += 1
        if at < len(text) or not parts:
            parts.append(self._new(super().feed(text[at:])))
        return Parsed.joined(parts)

    def flush(self) -> Parsed:
        return self._new(super().flush())

    def _new(self, parsed: Parsed) -> Parsed:
        text, thought, calls = parsed
        if self._known:
            if thought:
                thought = self._without_known(thought)
            elif text:
                text = self._without_known(text)
            if calls or not self.held.startswith(self._known):  # the known text belongs to a call or a marker
                self._known = ""
        if (first := self._unreported) is not NOTHING:
            text, thought, calls = Parsed.joined([first, Parsed(text, thought, calls)])
            self._unreported = NOTHING
        if calls and self._earlier:
            calls = [delta._replace(index=delta.index - self._earlier) for delta in calls]
        return Parsed(text, thought, calls)

    def _without_known(self, shown: str) -> str:
        known, same = self._known, 0
        while same < min(len(known), len(shown)) and known[same] == shown[same]:
            same += 1
        self._known = known[same:] if same == len(shown) else ""
        return shown[same:]
