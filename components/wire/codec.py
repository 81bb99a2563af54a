"""Messages as msgpack pairs [tag, fields]. Unpacking raises MalformedMessage.

A receiver ignores unknown fields, so a newer sender may add a field with a default. Any other change that older processes
cannot read, such as a new tag, raises PROTOCOL. If this process cannot read the older form, OLDEST rises, too.
"""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Final, TypeVar, dataclass_transform

import msgpack
import msgspec
from msgspec.msgpack import Decoder, Encoder

from components.errors import MalformedMessage

PROTOCOL: Final = 3
OLDEST: Final = 3  # earlier requests have other sampling parameters
UNNAMED: Final = 1  # of records without a version
MAX_MESSAGE_BYTES: Final = 8 * 1024 * 1024
MAX_ITEMS: Final = 1 << 20
# Characters of subject and reply subject. NATS closes a connection whose line exceeds 4 kB, and nats-py does not reconnect.
MAX_SUBJECT: Final = 1000
MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class UnknownMessage(MalformedMessage):
    pass


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Struct(msgspec.Struct, frozen=True, omit_defaults=True): ...


Subject = Annotated[str, msgspec.Meta(max_length=MAX_SUBJECT // 2)]  # on NATS
Id = Annotated[str, msgspec.Meta(max_length=256)]  # of an instance: a part of subjects

S = TypeVar("S", bound=Struct)

_encoder: Final = Encoder()
_pair: Final = Decoder(tuple[str, msgspec.Raw])
_by_tag: dict[str, type[Struct]] = {}
_tags: dict[type[Struct], str] = {}
_heads: dict[type[Struct], bytes] = {}
_decoders: dict[type[Struct], Decoder[Any]] = {}


def understood(protocol: int, oldest: int) -> bool:
    return oldest <= PROTOCOL and protocol >= OLDEST


def message(tag: str) -> Callable[[type[S]], type[S]]:
    """`tag` is "<conversation>.v<version>"."""

    def register(cls: type[S]) -> type[S]:
        if tag in _by_tag:
            raise ValueError(f"message tag {tag!r} is already used by {_by_tag[tag].__name__}")
        _by_tag[tag] = cls
        _tags[cls] = tag
        _heads[cls] = b"\x92" + _encoder.encode(tag)
        _decoders[cls] = Decoder(cls)
        return cls

    return register


def pack(value: Struct) -> bytes:
    return _heads[type(value)] + _encoder.encode(value)


def unpack(data: bytes, *expected: type[S]) -> S:
    if len(data) > MAX_MESSAGE_BYTES:
        raise MalformedMessage(f"{len(data)} bytes exceed the limit of {MAX_MESSAGE_BYTES}")
    try:
        tag, body = _pair.decode(data)
    except MALFORMED as exc:
        raise MalformedMessage(f"not a [tag, fields] pair: {exc}") from exc
    cls = _by_tag.get(tag)
    if cls is None:
        raise UnknownMessage(f"unknown message tag {tag[:64]!r}; is a peer newer than this process?")
    if cls not in expected:
        wanted = ", ".join(_tags[e] for e in expected)
        raise MalformedMessage(f"message {tag!r} where {wanted} belongs")
    try:
        value: S = _decoders[cls].decode(body)
    except MALFORMED as exc:
        raise MalformedMessage(f"message {tag!r}: {exc}") from exc
    return value


def unpack_plain(data: bytes) -> Any:
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


class Dated(Struct, kw_only=True):
    """A message with a deadline, which `components.messaging.clocks` converts to the receiver's clock."""

    sent_by: ClassVar[str] = ""  # role of the sender
    fences_writes: ClassVar[bool] = False  # a deadline too late would allow writes into reused pages

    deadline_unix_ms: int  # by the sender's wall clock
    sender: str = ""
    sent_unix_ms: int = 0  # 0: unknown, so not converted
