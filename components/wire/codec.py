"""How a message becomes bytes: a msgpack pair [tag, fields], the fields validated by pydantic on the way in.

Unknown tags are refused; unknown fields are ignored, so that a newer peer may add a field with a default. There is no
pickle anywhere, and the unpacker's limits are set so that a short frame cannot claim a huge allocation.
"""

from collections.abc import Callable
from dataclasses import field, fields
from typing import Any, Final, TypeVar, dataclass_transform, get_args

import msgpack
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from components.errors import MalformedMessage

T = TypeVar("T")

MAX_MESSAGE_BYTES: Final = 8 * 1024 * 1024  # the max_payload that every deployment we ship gives NATS
MAX_ITEMS: Final = 1 << 20

_by_tag: dict[str, type[Any]] = {}
_tags: dict[type[Any], str] = {}
_adapters: dict[type[Any], TypeAdapter[Any]] = {}
# of messages and parts
_fields: dict[type[Any], frozenset[str]] = {}
_parts: dict[type[Any], list[tuple[str, type[Any]]]] = {}  # fields that hold one, and which


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def message(tag: str) -> Callable[[type[T]], type[T]]:
    """Make a class a frozen, slotted, validated message that travels under `tag` ("<conversation>.v<version>")."""

    def register(cls: type[T]) -> type[T]:
        if tag in _by_tag:
            raise ValueError(f"message tag {tag!r} is taken by {_by_tag[tag].__name__}")
        made = part(cls)
        _by_tag[tag] = made
        _tags[made] = tag
        _adapters[made] = TypeAdapter(made)
        return made

    return register


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def part(cls: type[T]) -> type[T]:
    """Make a class a frozen, slotted, validated value inside messages, as `x: Part [| None]` or `x: list[Part]`."""
    config = ConfigDict(extra="ignore", strict=True)
    made: type[T] = pydantic_dataclass(cls, frozen=True, slots=True, kw_only=True, config=config)  # type: ignore[assignment]
    _fields[made] = frozenset(f.name for f in fields(made))  # type: ignore[arg-type]
    inner = {f.name: _part_in(f.type) for f in fields(made)}  # type: ignore[arg-type]
    _parts[made] = [(name, kind) for name, kind in inner.items() if kind is not None]
    return made


def _part_in(annotation: Any) -> type[Any] | None:
    return next(
        (kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type) and kind in _fields), None
    )


def pack(value: object) -> bytes:
    """Bytes of a message made by `@message`. Fields that are as they are by default are left out."""
    cls = type(value)
    body = _adapters[cls].dump_python(value, exclude_defaults=True)
    packed: bytes = msgpack.packb([_tags[cls], body], use_bin_type=True)
    return packed


def unpack(data: bytes, *expected: type[T]) -> T:
    """The message in `data`, which must be one of the `expected` classes.

    Raises: MalformedMessage, naming what is wrong, for anything else.
    """
    tag, body = _unpack_pair(data)
    cls = _by_tag.get(tag)
    if cls is None:
        raise MalformedMessage(f"unknown message tag {tag[:64]!r}; is a peer newer than this process?")
    if cls not in expected:
        wanted = ", ".join(_tags[e] for e in expected)
        raise MalformedMessage(f"message {tag!r} where {wanted} belongs")
    value: T = _build(cls, body, f"message {tag!r}: field ", "")
    return value


def _build(cls: type[Any], body: dict[str, Any], context: str, path: str) -> Any:
    """An instance of a message or part from the plain values it was packed as. Raises: MalformedMessage."""
    known = _fields[cls]
    values = body if body.keys() <= known else {name: given for name, given in body.items() if name in known}
    for name, inner in _parts[cls]:
        given = values.get(name)
        if isinstance(given, dict):
            values[name] = _build(inner, given, context, f"{path}{name}.")
        elif isinstance(given, list):
            values[name] = [_in_list(inner, item, context, f"{path}{name}.{at}") for at, item in enumerate(given)]
    try:
        return cls(**values)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        where = path + ".".join(str(step) for step in first["loc"])
        raise MalformedMessage(f"{context}{where!r}: {first['msg']}") from exc


def _in_list(cls: type[Any], given: object, context: str, path: str) -> Any:
    """A part that stands in a list."""
    if not isinstance(given, dict):
        raise MalformedMessage(f"{context}{path!r}: it should be a map of fields")
    return _build(cls, given, context, f"{path}.")


def _unpack_pair(data: bytes) -> tuple[str, dict[str, Any]]:
    pair = unpack_plain(data)
    if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], dict)):
        raise MalformedMessage("not a [tag, fields] pair")
    return pair[0], pair[1]


def unpack_plain(data: bytes) -> Any:
    """The msgpack value in `data`, under our limits. Raises: MalformedMessage."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise MalformedMessage(f"{len(data)} bytes exceed the limit of {MAX_MESSAGE_BYTES}")
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_str_len=MAX_MESSAGE_BYTES,
            max_bin_len=MAX_MESSAGE_BYTES,
            max_array_len=MAX_ITEMS,
            max_map_len=4096,
            max_ext_len=0,
        )
    except (ValueError, msgpack.exceptions.UnpackException, UnicodeDecodeError) as exc:
        raise MalformedMessage(f"not msgpack: {type(exc).__name__}") from exc
