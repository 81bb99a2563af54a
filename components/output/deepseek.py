# ruff: noqa: RUF001, RUF002  # the bars in DeepSeek's tokens are wide
"""DeepSeek's calls, with special tokens around each call and around all.

V3 and R1: `function<｜tool▁sep｜>name`, a line end, and arguments in a fence. V3.1: `name<｜tool▁sep｜>{…}`.
"""

from typing import Final

from components.output.calls import is_tool_name
from components.output.json_calls import arguments
from components.output.reader import Reader, Steps

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR: Final = "<｜tool▁sep｜>"


def deepseek(r: Reader) -> Steps[None]:
    while begin := (yield from r.until([CALLS, CALL], r.emit_text)):
        r.hold()
        if begin == CALLS:
            r.skip(len(CALLS))
            yield from r.spaces()
        if not (yield from _call(r)):
            r.give_back(len(begin))
            continue
        while True:
            yield from r.spaces()
            r.hold()
            if not (yield from _call(r)):
                r.give_back()
                break
        yield from r.closing(CALLS_END)


def _call(r: Reader) -> Steps[bool]:
    if not (yield from r.literal(CALL)):
        return False
    head: list[str] = []
    if (yield from r.until([SEPARATOR, CALL, CALL_END], head.append)) != SEPARATOR:
        return False
    r.skip(len(SEPARATOR))
    yield from r.spaces()
    if (yield from r.char()) != "{":  # the head was the call's type, and its name follows
        head.clear()
        yield from r.until(["\n", "```", "{", CALL_END], head.append)
        yield from r.spaces()
        yield from r.literal("```json")
        yield from r.spaces()
    name = "".join(head).strip()
    if not is_tool_name(name) or (yield from r.char()) != "{":
        return False
    r.begin_call(name)
    yield from arguments(r, [CALL_END, CALLS_END])
    yield from r.spaces("`")
    yield from r.closing(CALL_END)
    return True
