"""Long answers as JSON part by part: none takes long to write, so that others get their turn in between."""

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

from pydantic import BaseModel

PART: Final = 4096  # items of a list, or characters: 0.5 ms, and of names of tokens 2 ms

T = TypeVar("T")
Parts = Generator[bytes, None, None]


def filled(answer: BaseModel, *lists: Iterable[bytes]) -> Parts:
    """The JSON of `answer`, whose first lists, which are empty, are filled with these items: one or several at a time."""
    head, *rest = answer.model_dump_json().encode().split(b"[]", len(lists))
    yield head
    for items, behind in zip(lists, rest, strict=True):
        before = b"["
        for item in items:
            yield before + item
            before = b","
        yield (b"[]" if before == b"[" else b"]") + behind


def items_of(values: Sequence[T], shown: Callable[[Sequence[T]], Sequence[Any]] = list) -> Iterator[bytes]:
    """A list's items, many at a time; `shown` makes of some values what is to be written."""
    for start in range(0, len(values), PART):
        yield json.dumps(shown(values[start : start + PART]), ensure_ascii=False, separators=(",", ":"))[1:-1].encode()


def text_filled(answer: BaseModel, text: str) -> Parts:
    """The JSON of `answer`, the first of whose strings, which is empty, is `text`."""
    head, behind = answer.model_dump_json().encode().split(b'""', 1)
    yield head + b'"'
    for start in range(0, len(text), PART):
        yield json.dumps(text[start : start + PART], ensure_ascii=False)[1:-1].encode()
    yield b'"' + behind
