"""Qwen3-Coder's calls: an element for each function and parameter. The tool's schema determines the values' types."""

import json
from typing import Final

from components.output.calls import is_tool_name
from components.output.reader import Reader, Schema, Steps, ignore
from components.output.typed_values import typed_value

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
VALUE_ENDS: Final = ("\n" + PARAMETER_END, PARAMETER_END, "\n" + PARAMETER, "\n" + FUNCTION_END, "\n" + CALL_END)


def qwen3_coder(r: Reader) -> Steps[None]:
    """Read `<tool_call> <function=f> <parameter=a> 1 </parameter> </function> </tool_call>`; the outermost is optional."""
    while begin := (yield from r.until([CALL, FUNCTION], r.emit_text)):
        r.hold()
        if begin == CALL:
            r.skip(len(CALL))
            yield from r.spaces()
        name = (yield from _tag(r)) if (yield from r.literal(FUNCTION)) else ""
        if not is_tool_name(name):
            r.give_back(len(begin))
            continue
        r.begin_call(name)
        yield from _parameters(r, r.tools.get(name, {}))
        yield from r.spaces()
        yield from r.closing(CALL_END)


def _tag(r: Reader) -> Steps[str]:
    name: list[str] = []
    if (yield from r.until([">", "<", "\n"], name.append)) != ">":
        return ""
    r.skip()
    return "".join(name).strip()


def _parameters(r: Reader, parameters: Schema) -> Steps[None]:
    """A cut-off value leaves the JSON object open, so that clients notice."""
    r.argue("{")
    comma = ""
    while (yield from r.until([PARAMETER, FUNCTION_END, CALL_END], ignore)) == PARAMETER:
        r.skip(len(PARAMETER))
        if not (name := (yield from _tag(r))):
            continue
        r.argue(f"{comma}{json.dumps(name, ensure_ascii=False)}: ")
        comma = ", "
        yield from r.literal("\n")
        if not (yield from typed_value(r, parameters, name, VALUE_ENDS)):
            return
        yield from r.literal("\n")
        yield from r.closing(PARAMETER_END)
    if (yield from r.char()):
        r.argue("}")
        r.end_call()
    yield from r.closing(FUNCTION_END)
