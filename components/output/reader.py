"""A reader for text that is still arriving, for the formats of tool calls.

A format is a generator function over a `Reader`, which yields when it needs more text.
"""

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import groupby
from typing import Final, NamedTuple, TypeVar

from pydantic import JsonValue

from components.output.calls import CallDelta

T = TypeVar("T")
Steps = Generator[None, None, T]
Schema = Mapping[str, JsonValue]  # JSON Schema
Format = Callable[["Reader"], Steps[None]]

SPACES: Final = " \t\r\n"
LONGEST_WORD: Final = 400  # characters of a number; a double needs fewer
_SPACES: Final = re.compile(r"[ \t\r\n]*")
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]*')  # part of a JSON string without escapes
_WORD: Final = re.compile(r"[-+.0-9A-Za-z]*")  # a number, true, false or null
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_HEX: Final = "0123456789abcdefABCDEF"
# characters that models forget to escape in strings
_RAW: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}


class Parsed(NamedTuple):
    text: str
    reasoning: str
    calls: Sequence[CallDelta]

    @classmethod
    def joined(cls, parts: "Sequence[Parsed]") -> "Parsed":
        if len(parts) == 1:
            return parts[0]
        return cls(
            "".join([part.text for part in parts]),
            "".join([part.reasoning for part in parts]),
            [delta for part in parts for delta in part.calls],
        )


NOTHING: Final = Parsed("", "", ())


class Enough(Exception): ...


class _Thought(NamedTuple):
    text: str


class _Spaced:
    """Holds spaces at the end of a text until more text follows."""

    __slots__ = ("has_any", "spaces")

    def __init__(self) -> None:
        self.has_any = False
        self.spaces = ""

    def shown(self, text: str, *, strip: bool) -> str:
        """The text that can now be reported. `strip`: drop spaces before the first."""
        whole = self.spaces + text
        shown = whole.rstrip(SPACES)
        if not shown:
            self.spaces = whole
            return ""
        self.spaces = whole[len(shown) :]
        if strip and not self.has_any:
            shown = shown.lstrip(SPACES)
        self.has_any = True
        return shown


def ignore(_: str) -> None:
    """Report nothing, for `Reader.until` and `Reader.value`."""


class Reader:
    def __init__(
        self, read: Format, tools: Mapping[str, Schema], new_id: Callable[[], str], *, single: bool = False
    ) -> None:
        """`tools`: parameters by tool name. `single`: stop after the first call."""
        self.tools = tools
        self.done = False  # the rest of the text is ignored
        self.num_calls = 0
        self.calling = False  # the last call is incomplete
        self._new_id = new_id
        self._single = single
        self._buffer = ""
        self._at = 0
        self._mark: int | None = None  # position to return to if no call follows
        self._ended = False
        self._text = _Spaced()
        self._thoughts = _Spaced()
        self._found: list[str | CallDelta | _Thought] = []  # to report, in order
        self._steps = read(self)

    @property
    def held(self) -> str:
        """The held end of the text, which may belong to a call."""
        return "" if self.calling else self._text.spaces + self._buffer[self._kept :]

    @property
    def has_text(self) -> bool:
        return self._text.has_any

    @property
    def has_thought(self) -> bool:
        return self._thoughts.has_any

    @property
    def _kept(self) -> int:
        return self._at if self._mark is None else self._mark

    def feed(self, text: str) -> Parsed:
        if self.done:
            return NOTHING
        keep = self._kept
        self._buffer = self._buffer[keep:] + text
        self._at -= keep
        if self._mark is not None:
            self._mark = 0
        return self._resume()

    def end(self) -> Parsed:
        self._ended = True
        return NOTHING if self.done else self._resume()

    def _resume(self) -> Parsed:
        try:
            next(self._steps)
        except (StopIteration, Enough):
            self.done = True
            if not self.num_calls and self._text.spaces:
                self._found.append(self._text.spaces)
        # clients get reasoning before text and calls, so later reasoning waits for the next report
        rest = next((at for at in range(1, len(self._found)) if self._begins_again(at)), len(self._found))
        if self.done:
            rest = len(self._found)
        found, self._found = self._found[:rest], self._found[rest:]
        calls = [piece for piece in found if isinstance(piece, CallDelta)]
        return Parsed(
            "".join([piece for piece in found if isinstance(piece, str)]),
            "".join([piece.text for piece in found if isinstance(piece, _Thought)]),
            _joined(calls) if calls else (),
        )

    def _begins_again(self, at: int) -> bool:
        return isinstance(self._found[at], _Thought) and not isinstance(self._found[at - 1], _Thought)

    def char(self) -> Steps[str]:
        """The next character, not consumed; "" at the end."""
        while self._at >= len(self._buffer):
            if self._ended:
                return ""
            yield
        return self._buffer[self._at]

    def skip(self, count: int = 1) -> None:
        self._at += count

    def spaces(self, also: str = "") -> Steps[None]:
        while (char := (yield from self.char())) and (char in SPACES or char in also):
            self._at += 1

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Skip and return a match of `pattern`, which must also match the empty text."""
        found = []
        while (yield from self.char()):
            match = pattern.match(self._buffer, self._at)
            assert match is not None
            found.append(match[0])
            self._at = match.end()
            if self._at < len(self._buffer):
                break
        return "".join(found)

    def literal(self, text: str) -> Steps[bool]:
        for i in range(len(text)):
            while self._at + i >= len(self._buffer):
                if self._ended:
                    return False
                yield
            if self._buffer[self._at + i] != text[i]:
                return False
        self._at += len(text)
        return True

    def closing(self, text: str) -> Steps[None]:
        """Skip `text`, even if cut off."""
        if not (yield from self.literal(text)) and self._ended and text.startswith(self._buffer[self._at :]):
            self._at = len(self._buffer)

    def until(self, markers: Sequence[str], emit: Callable[[str], None]) -> Steps[str]:
        """Report the text before the first of `markers`. Return that marker, not consumed; "" at the end."""
        while True:
            found = [(at, marker) for marker in markers if (at := self._buffer.find(marker, self._at)) >= 0]
            # of two at the same place the longer one is chosen
            at, marker = min(found, key=lambda hit: (hit[0], -len(hit[1])), default=(len(self._buffer), ""))
            if not marker and not self._ended:
                at -= beginning(self._buffer, self._at, markers)
            if at > self._at:
                emit(self._buffer[self._at : at])
                self._at = at
            if marker or self._ended:
                return marker
            yield

    def hold(self) -> None:
        self._mark = self._at

    def give_back(self, count: int = 0) -> None:
        """Return to the mark: no call follows. The first `count` characters are text, the rest is read again."""
        assert self._mark is not None
        self._at, self._mark = self._mark + count, None
        if count:
            self.emit_text(self._buffer[self._at - count : self._at])

    def release(self) -> None:
        self._mark = None

    def emit_text(self, text: str) -> None:
        if shown := self._text.shown(text, strip=self.num_calls > 0):
            self._found.append(shown)

    def emit_thought(self, text: str) -> None:
        if shown := self._thoughts.shown(text, strip=True):
            self._found.append(_Thought(shown))

    def begin_call(self, name: str) -> None:
        self._mark = None
        self._found.append(CallDelta(self.num_calls, self._new_id(), name, ""))
        self.num_calls += 1
        self.calling = True

    def argue(self, text: str) -> None:
        self._found.append(CallDelta(self.num_calls - 1, None, None, text))

    def end_call(self) -> None:
        self.calling = False
        if self._single:
            raise Enough

    def string(self) -> Steps[str | None]:
        """Skip a JSON string without escapes, such as a name. Return its value; None for anything else."""
        if not (yield from self.literal('"')):
            return None
        text = yield from self.run(_PLAIN)
        return text if (yield from self.literal('"')) else None

    def value(self, emit: Callable[[str], None]) -> Steps[bool]:
        """Report a JSON value as it arrives; numbers and names only when complete. Control characters in strings are escaped.

        Returns: False if the text is not JSON; the reader is then at the fault.
        """
        opened: list[str] = []  # expected closing brackets
        first = False  # directly after an opening bracket
        while True:
            yield from self._pass_spaces(emit)
            char = yield from self.char()
            if first and char == opened[-1]:
                pass  # an empty object or list
            elif opened and opened[-1] == "}" and not (yield from self._key(emit)):
                return False
            else:
                char = yield from self.char()
                if char and char in "{[":
                    self._pass(char, emit)
                    opened.append("}" if char == "{" else "]")
                    first = True
                    continue
                if not (yield from self._scalar(char, emit)):
                    return False
            first = False
            while opened:  # after a value, or before the bracket that closes an empty one
                yield from self._pass_spaces(emit)
                char = yield from self.char()
                if char == opened[-1]:
                    self._pass(char, emit)
                    opened.pop()
                elif char == ",":
                    self._pass(char, emit)
                    break
                else:
                    return False
            if not opened:
                return True

    def _key(self, emit: Callable[[str], None]) -> Steps[bool]:
        if not (yield from self._string(emit)):
            return False
        yield from self._pass_spaces(emit)
        if (yield from self.char()) != ":":
            return False
        self._pass(":", emit)
        yield from self._pass_spaces(emit)
        return True

    def _scalar(self, char: str, emit: Callable[[str], None]) -> Steps[bool]:
        if char == '"':
            return (yield from self._string(emit))
        while True:
            match = _WORD.match(self._buffer, self._at)
            assert match is not None
            if match.end() < len(self._buffer) or self._ended or len(match[0]) > LONGEST_WORD:
                break
            yield
        word = match[0]
        if word not in {"true", "false", "null"} and not _NUMBER.fullmatch(word):
            return False
        self._pass(word, emit)
        return True

    def _string(self, emit: Callable[[str], None]) -> Steps[bool]:
        if (yield from self.char()) != '"':
            return False
        self._pass('"', emit)
        while True:
            match = _PLAIN.match(self._buffer, self._at)
            assert match is not None
            if match[0]:
                self._pass(match[0], emit)
            char = yield from self.char()
            if char == '"':
                self._pass('"', emit)
                return True
            if char == "\\":
                if not (yield from self._escape(emit)):
                    return False
            elif not char:
                return False
            elif char < " ":
                self._at += 1
                emit(_RAW.get(char) or f"\\u{ord(char):04x}")

    def _escape(self, emit: Callable[[str], None]) -> Steps[bool]:
        sequence = "\\"
        length = 2
        while len(sequence) < length:
            while self._at + len(sequence) >= len(self._buffer):
                if self._ended:
                    return False
                yield
            char = self._buffer[self._at + len(sequence)]
            if len(sequence) == 1:
                length = 6 if char == "u" else 2
            if char not in ('"\\/bfnrtu' if len(sequence) == 1 else _HEX):
                return False
            sequence += char
        self._pass(sequence, emit)
        return True

    def _pass_spaces(self, emit: Callable[[str], None]) -> Steps[None]:
        if spaces := (yield from self.run(_SPACES)):
            emit(spaces)

    def _pass(self, text: str, emit: Callable[[str], None]) -> None:
        self._at += len(text)
        emit(text)


def _joined(deltas: Sequence[CallDelta]) -> list[CallDelta]:
    joined = []
    for (index, name), run in groupby(deltas, key=lambda delta: (delta.index, delta.name)):
        if name is None:
            joined.append(CallDelta(index, None, None, "".join([delta.arguments for delta in run])))
        else:
            joined += run
    return joined


def beginning(text: str, start: int, markers: Sequence[str]) -> int:
    """Length of the end of `text[start:]` that may begin a marker."""
    longest = max(map(len, markers), default=1)
    for at in range(max(start, len(text) - longest + 1), len(text)):
        if any(marker.startswith(text[at:]) for marker in markers):
            return len(text) - at
    return 0
