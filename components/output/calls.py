"""Tool calls and their deltas, independent of the model's format."""

from collections.abc import Iterable
from typing import Final, NamedTuple

MAX_NAME: Final = 256  # characters; a longer name would be refused when the client sends it back


class CallDelta(NamedTuple):
    """A call's first delta has `id` and `name`; later ones have arguments only."""

    index: int  # type: ignore[assignment]  # number in its choice, from 0; hides the tuple's method
    id: str | None
    name: str | None
    arguments: str  # the next characters of a JSON text


class Call(NamedTuple):
    id: str
    name: str
    arguments: str  # JSON, if the model wrote valid JSON


def is_tool_name(text: str) -> bool:
    return 0 < len(text) <= MAX_NAME


def whole_calls(deltas: Iterable[CallDelta]) -> list[Call]:
    calls: list[tuple[str, str, list[str]]] = []
    for delta in deltas:
        if delta.name is not None:
            calls.append((delta.id or "", delta.name, []))
        calls[delta.index][2].append(delta.arguments)
    return [Call(call_id, name, "".join(arguments)) for call_id, name, arguments in calls]
