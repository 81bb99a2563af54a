"""Errors as answers to messages."""

import math

from msgspec import field

from components.errors import BY_NAME, MeshError, Overloaded, PeerBroken, reported
from components.wire.codec import Struct, message


@message("refused.v1")
class Refused(Struct):
    """`error` is a class name of `components.errors`."""

    error: str
    message: str
    fields: dict[str, str | int | float | None] = field(default_factory=dict)


def refusal(error: MeshError) -> Refused:
    fields = {name: _plain(value) for name, value in error.fields.items()}
    return Refused(error=type(error).__name__, message=error.message, fields=fields)


def raised(refused: Refused) -> MeshError:
    """InvariantBroken and unknown classes become PeerBroken."""
    if refused.error not in BY_NAME:
        return PeerBroken(f"{refused.error}: {refused.message}")
    cls = reported(refused.error)
    fields = dict(refused.fields)
    if issubclass(cls, Overloaded):
        return cls(refused.message, retry_after_s=_seconds(fields.pop("retry_after_s", None)), **fields)
    return cls(refused.message, **fields)


def _plain(value: object) -> str | int | float | None:
    if value is None or type(value) in (str, float) or (type(value) is int and -(2**63) <= value < 2**63):
        return value  # type: ignore[return-value]
    return str(value)


def _seconds(value: str | int | float | None) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) and value >= 0 else 1.0
