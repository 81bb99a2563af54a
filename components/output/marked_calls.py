# ruff: noqa: RUF001, RUF002  # the bars in DeepSeek's tokens are wide
"""Calls with special tokens around each call and around all: `name SEPARATOR {…}`.

DeepSeek V3 and R1 write `function<｜tool▁sep｜>name`, a line end, and arguments in a fence. Kimi K2 writes
`functions.name:0` as the name, with the number of the call in the conversation.
"""

import re
from typing import Final, NamedTuple

from components.output.calls import is_tool_name
from components.output.json_calls import arguments
from components.output.reader import Reader, Steps


class Markers(NamedTuple):
    calls: str
    call: str
    separator: str
    call_end: str
    calls_end: str


DEEPSEEK: Final = Markers(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
KIMI: Final = Markers(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
KIMI_NAME: Final = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)


def deepseek(r: Reader) -> Steps[None]:
    yield from _calls(r, DEEPSEEK)


def kimi(r: Reader) -> Steps[None]:
    yield from _calls(r, KIMI)


def kimi_id(name: str, number: int) -> str:
    """Id of call `number` of a conversation. Kimi's template shows a call's name by its id alone."""
    return f"functions.{name}:{number}"


def _calls(r: Reader, markers: Markers) -> Steps[None]:
    while begin := (yield from r.until([markers.calls, markers.call], r.emit_text)):
        r.hold()
        if begin == markers.calls:
            r.skip(len(begin))
            yield from r.spaces()
        if not (yield from _call(r, markers)):
            r.give_back(len(begin))
            continue
        while True:
            yield from r.spaces()
            r.hold()
            if not (yield from _call(r, markers)):
                r.give_back()
                break
        yield from r.closing(markers.calls_end)


def _call(r: Reader, markers: Markers) -> Steps[bool]:
    if not (yield from r.literal(markers.call)):
        return False
    head: list[str] = []
    if (yield from r.until([markers.separator, markers.call, markers.call_end], head.append)) != markers.separator:
        return False
    r.skip(len(markers.separator))
    yield from r.spaces()
    if (yield from r.char()) != "{" and markers is DEEPSEEK:  # the head was the call's type, and its name follows
        head.clear()
        yield from r.until(["\n", "```", "{", markers.call_end], head.append)
        yield from r.spaces()
        yield from r.literal("```json")
        yield from r.spaces()
    name = "".join(head).strip()
    if markers is KIMI and (found := KIMI_NAME.fullmatch(name)):
        name = found[1]
    if not is_tool_name(name) or (yield from r.char()) != "{":
        return False
    r.begin_call(name)
    yield from arguments(r, [markers.call_end, markers.calls_end])
    yield from r.spaces("`")
    yield from r.closing(markers.call_end)
    return True
