"""Tool calls as they are told of: piece by piece, whatever format the model writes them in."""

from collections.abc import Iterable
from typing import NamedTuple


class CallDelta(NamedTuple):
    """What is new of one call. Its first delta has `id` and `name` and no arguments; later ones have arguments alone."""

    index: int  # type: ignore[assignment]  # of the call in its choice, from 0; hides the tuple's method
    id: str | None
    name: str | None
    arguments: str  # the next characters of a JSON text


class Call(NamedTuple):
    """One whole call."""

    id: str
    name: str
    arguments: str  # JSON, unless the model wrote something else


def whole_calls(deltas: Iterable[CallDelta]) -> list[Call]:
    """What a stream of deltas adds up to."""
    calls: list[tuple[str, str, list[str]]] = []
    for delta in deltas:
        if delta.name is not None:
            calls.append((delta.id or "", delta.name, []))
        calls[delta.index][2].append(delta.arguments)
    return [Call(call_id, name, "".join(arguments)) for call_id, name, arguments in calls]
