"""GLM's calls: the tool's name, then an element for each argument's name and one for its value."""

import json
import re
from typing import Final

from components.output.calls import is_tool_name
from components.output.reader import Reader, Schema, Steps, ignore
from components.output.typed_values import typed_value

CALL, CALL_END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
NO_NAME: Final = re.compile(r"[\s{\[\"<]")  # other formats begin with <tool_call>, too


def glm(r: Reader) -> Steps[None]:
    """Read `<tool_call>f <arg_key>a</arg_key> <arg_value>1</arg_value> </tool_call>`."""
    while (yield from r.until([CALL], r.emit_text)):
        r.hold()
        r.skip(len(CALL))
        yield from r.spaces()
        head: list[str] = []
        end = yield from r.until(["\n", KEY, CALL_END], head.append)
        name = "".join(head).strip()
        if not end or not is_tool_name(name) or NO_NAME.search(name):
            r.give_back(len(CALL))
            continue
        r.begin_call(name)
        yield from _arguments(r, r.tools.get(name, {}))
        yield from r.closing(CALL_END)


def _arguments(r: Reader, parameters: Schema) -> Steps[None]:
    """A cut-off value leaves the JSON object open, so that clients notice."""
    r.argue("{")
    comma = ""
    while (yield from r.until([KEY, CALL_END], ignore)) == KEY:
        r.skip(len(KEY))
        key: list[str] = []
        yield from r.until([KEY_END, VALUE, CALL_END], key.append)
        yield from r.closing(KEY_END)
        yield from r.spaces()
        if not (yield from r.literal(VALUE)):
            continue
        name = "".join(key).strip()
        r.argue(f"{comma}{json.dumps(name, ensure_ascii=False)}: ")
        comma = ", "
        if not (yield from typed_value(r, parameters, name, (VALUE_END, CALL_END))):
            return
        yield from r.closing(VALUE_END)
    if (yield from r.char()):
        r.argue("}")
        r.end_call()
