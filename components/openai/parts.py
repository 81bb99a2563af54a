"""Long answers as JSON in parts, so that other tasks run in between."""

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

from pydantic import BaseModel

PART: Final = 4096  # items of a list or characters, 0.5 to 2 ms
AT_ONCE_BYTES: Final = 64 * 1024  # before other tasks run; takes 1 to 3 ms

T = TypeVar("T")
Parts = Generator[bytes, None, None]
Items = Iterable[bytes | Iterable[bytes]]  # one or more items, or one item in parts


def some_of(parts: Parts) -> bytes:
    """The next parts, at least AT_ONCE_BYTES except at the end."""
    taken, size = [], 0
    for part in parts:
        taken.append(part)
        size += len(part)
        if size >= AT_ONCE_BYTES:
            break
    return b"".join(taken)


def filled(answer: BaseModel, **lists: Items) -> Parts:
    """The JSON of `answer`, with items for its empty `lists`, in the order of fields.

    No text can contain such a name: its quotes are escaped.
    """
    rest = answer.model_dump_json().encode()
    for name, items in lists.items():
        key = b'"%b":[' % name.encode()
        head, rest = rest.split(key + b"]", 1)
        yield head + key
        before = b""
        for item in items:
            if isinstance(item, bytes):
                yield before + item
            else:
                yield before
                yield from item
            before = b","
        rest = b"]" + rest
    yield rest


def items_of(
    values: Sequence[T], shown: Callable[[Sequence[T]], Sequence[Any]] = list, at_once: int = PART
) -> Iterator[bytes]:
    """A list's items, many at a time; `shown` converts values."""
    for start in range(0, len(values), at_once):
        some = shown(values[start : start + at_once])
        yield json.dumps(some, ensure_ascii=False, separators=(",", ":"))[1:-1].encode()


def text_filled(answer: BaseModel, text: str) -> Parts:
    """The JSON of `answer`; `text` fills its first empty string."""
    head, behind = answer.model_dump_json().encode().split(b'""', 1)
    yield head + b'"'
    for start in range(0, len(text), PART):
        yield json.dumps(text[start : start + PART], ensure_ascii=False)[1:-1].encode()
    yield b'"' + behind
