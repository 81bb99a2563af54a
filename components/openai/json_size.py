"""Limits on a JSON text, checked before it is parsed: a parser creates all objects while it holds the GIL.

A text of 4 MB may hold a million empty objects. Useful requests have few strings, objects and arrays, but may have many token
ids. So there are two limits.
"""

import re
from collections.abc import Iterable
from itertools import chain
from typing import Any, Final

from components.errors import Rejected

MAX_VALUES: Final = 100_000  # strings (keys, too), objects and arrays; also items of lists other than token ids
MAX_ITEMS: Final = 1 << 19  # of all lists: half a million token ids take 30 ms to parse
MAX_DIGITS: Final = 400  # a float has at most 309; parsing long integers takes quadratic time
MAX_KEYS: Final = 2048  # per object: pydantic creates an error for each unknown key
TOKEN_FIELDS: Final = frozenset({"prompt", "input", "tokens"})
SLICE_BYTES: Final = 32 * 1024  # checked in one go, in 0.1 to 2 ms
SMALL_BYTES: Final = 64 * 1024  # smaller ones are not checked
DIGITS: Final = bytes(ord("0") if chr(byte).isdecimal() and byte < 128 else byte for byte in range(256))
TOO_MUCH: Final = f"is too complex: at most {MAX_VALUES} strings, objects and arrays, and {MAX_ITEMS} token ids"
ESCAPE: Final = re.compile(rb"\\.", re.DOTALL)


def check_text(body: bytes) -> None:
    """Raises: Rejected. The body need not be JSON."""
    if (fault := fault_in_text(body)) is not None:
        raise Rejected(f"The request body {fault}.", code="invalid_value")


def fault_in_text(body: bytes) -> str | None:
    """What is wrong with a text, which need not be JSON."""
    if len(body) <= SMALL_BYTES:
        return None
    opened = quotes = commas = 0
    rest = b""  # a backslash at the end of the last slice
    for start in range(0, len(body), SLICE_BYTES):
        some = rest + body[start : start + SLICE_BYTES]
        if b"\\" in some:
            some = ESCAPE.sub(b"", some)
        rest = b"\\" if some.endswith(b"\\") else b""
        between = some.removesuffix(b"\\").split(b'"')
        outside = b"".join(between[quotes % 2 :: 2])
        quotes += len(between) - 1
        opened += outside.count(b"{") + outside.count(b"[")
        commas += outside.count(b",")
        if opened + (quotes + 1) // 2 > MAX_VALUES or commas > MAX_ITEMS + MAX_VALUES:
            return TOO_MUCH
        if b"0" * MAX_DIGITS in outside.translate(DIGITS):
            return f"has a number of more than {MAX_DIGITS} digits"
    return None


def check_value(body: bytes, value: Any) -> None:
    """Objects must have few keys, and long lists be token ids. Raises: Rejected."""
    if body.count(b":") <= MAX_KEYS and body.count(b",") <= MAX_VALUES:
        return
    if isinstance(value, dict):
        _check_keys(value)
        stack = [part for name, field in value.items() for part in _bounded(name, field)]
    else:
        stack = [*_containers([value])]
    items = 0
    while stack:
        container = stack.pop()
        if isinstance(container, dict):
            _check_keys(container)
            stack += _containers(container.values())
        else:
            items += len(container)
            if items > MAX_VALUES:
                raise _too_many()
            stack += _containers(container)


def _check_keys(found: dict[str, Any]) -> None:
    if len(found) > MAX_KEYS:
        raise Rejected(
            f"The request body has an object with {len(found)} keys; at most {MAX_KEYS} are allowed.",
            code="invalid_value",
        )


def _bounded(name: str, field: Any) -> Iterable[Any]:
    """A field's limited objects and arrays: all but lists of token ids, or lists of these."""
    if name not in TOKEN_FIELDS or not isinstance(field, list):
        return _containers([field])
    return chain.from_iterable(_containers(item) if isinstance(item, list) else (item,) for item in _containers(field))


def _containers(values: Iterable[Any]) -> Iterable[Any]:
    return (value for value in values if isinstance(value, dict | list))


def _too_many() -> Rejected:
    return Rejected(f"The request body {TOO_MUCH}.", code="invalid_value")
