"""Calls as JSON objects, `{"name": …, "arguments": {…}}`, after a marker, in a list, or bare."""

import json
from collections.abc import Sequence
from typing import Final

from components.output.calls import is_tool_name
from components.output.pythonic import as_json
from components.output.reader import Reader, Steps, ignore

ARGUMENTS: Final = ("arguments", "parameters")  # models' keys for arguments
OTHER_KEYS: Final = ("type", "id")  # also in a bare call; an object with another key is an answer
HERMES: Final = ("<tool_call>", "</tool_call>")
PYTHON_TAG: Final = "<|python_tag|>"
TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def hermes(r: Reader) -> Steps[None]:
    """Read `<tool_call>{…}</tool_call>`, the format of Hermes and of Qwen 2.5 and 3."""
    begin, end = HERMES
    while (yield from r.until([begin], r.emit_text)):
        r.hold()
        r.skip(len(begin))
        yield from r.spaces()
        if (yield from call_object(r, [end])):
            yield from r.closing(end)
        else:
            r.give_back(len(begin))


def llama3_json(r: Reader) -> Steps[None]:
    """Read Llama 3's calls, separated by semicolons, commas or spaces: the whole answer, or after a tag."""
    yield from _bare(r, [PYTHON_TAG])
    while (yield from r.until([PYTHON_TAG], r.emit_text)):
        r.hold()
        r.skip(len(PYTHON_TAG))
        yield from r.spaces()
        if (yield from call_object(r, [PYTHON_TAG])):
            yield from _more(r, [PYTHON_TAG])
        else:
            r.give_back(len(PYTHON_TAG))


def plain_json(r: Reader) -> Steps[None]:
    yield from _bare(r, [])
    yield from r.until([], r.emit_text)


def mistral(r: Reader) -> Steps[None]:
    """Read Mistral's calls: a list after one token or, since tokenizer version 11, a token before each `f[ARGS]{…}`."""
    while (yield from r.until([TOOL_CALLS], r.emit_text)):
        r.hold()
        r.skip(len(TOOL_CALLS))
        yield from r.spaces()
        if (yield from r.literal("[")):
            yield from r.spaces()
            if (yield from call_object(r, [TOOL_CALLS])):
                yield from _more(r, [TOOL_CALLS])
                yield from r.closing("]")
                continue
        elif (yield from _named(r)):
            continue
        r.give_back(len(TOOL_CALLS))


def _named(r: Reader) -> Steps[bool]:
    name: list[str] = []
    yield from r.until([ARGS, CALL_ID, "{", "\n", TOOL_CALLS], name.append)
    if (yield from r.literal(CALL_ID)):
        yield from r.until([ARGS, "{", "\n", TOOL_CALLS], ignore)
    yield from r.literal(ARGS)
    yield from r.spaces()
    called = "".join(name).strip()
    if not is_tool_name(called) or (yield from r.char()) != "{":
        return False
    r.begin_call(called)
    yield from arguments(r, [TOOL_CALLS])
    return True


def _bare(r: Reader, ends: Sequence[str]) -> Steps[None]:
    """Read calls at the beginning of the text, with or without a list around them."""
    r.hold()
    yield from r.spaces()
    listed = yield from r.literal("[")
    yield from r.spaces()
    if (yield from call_object(r, ends, bare=True)):
        yield from _more(r, ends)
        if listed:
            yield from r.closing("]")
    else:
        r.give_back()


def _more(r: Reader, ends: Sequence[str]) -> Steps[None]:
    """Read further calls, perhaps each after a separator. A separator without a call is text."""
    while True:
        yield from r.spaces()
        r.hold()
        separated = (yield from r.literal(";")) or (yield from r.literal(","))
        yield from r.spaces()
        if not (yield from call_object(r, ends, bare=not separated)):
            return r.give_back()


def call_object(r: Reader, ends: Sequence[str], *, bare: bool = False) -> Steps[bool]:
    """Read one object with keys in any order, and surplus closing brackets, which models miscount.

    Args:
        r: a reader that is at the object.
        ends: markers that end arguments which are not JSON.
        bare: no marker precedes the object, so it must name an offered tool and have arguments, but no unknown keys.
    Returns: whether it was reported as a call.
    """
    if not (yield from r.literal("{")):
        return False
    name: str | None = None
    early: list[str] = []  # arguments that precede the name
    while True:
        key = yield from _key(r)
        if key in ARGUMENTS and name is not None and (yield from r.char()) == "{":
            r.begin_call(name)
            yield from arguments(r, ends)
            yield from _rest(r)
            return True
        if key == "name" and name is None:
            name = yield from r.string()
            right = name is not None and (name in r.tools if bare else is_tool_name(name))
        elif key in ARGUMENTS:
            right = not early and (yield from _object(r, early))
        else:
            right = key is not None and (key in OTHER_KEYS or not bare) and (yield from r.value(ignore))
        if not right:
            return False
        yield from r.spaces()
        if not (yield from r.literal(",")):
            break
    if not (yield from r.literal("}")) or name is None or (bare and not early):
        return False
    r.begin_call(name)
    r.argue("".join(early) or "{}")
    r.end_call()
    yield from r.spaces("}")
    return True


def _object(r: Reader, found: list[str]) -> Steps[bool]:
    """Read an object, or a text with one, as Granite 4 writes arguments; add its JSON to `found`."""
    start = yield from r.char()
    if start != '"':
        return start == "{" and (yield from r.value(found.append))
    pieces: list[str] = []
    if not (yield from r.value(pieces.append)):
        return False
    try:
        read = json.loads(json.loads("".join(pieces)))
        found.append(as_json(read))
    except (ValueError, RecursionError):
        return False
    return isinstance(read, dict)


def arguments(r: Reader, ends: Sequence[str]) -> Steps[None]:
    """Report the call's arguments. If they are not JSON, they extend to one of `ends`."""
    if (yield from r.value(r.argue)) or (yield from r.until(ends, r.argue)):
        r.end_call()


def _rest(r: Reader) -> Steps[None]:
    yield from r.spaces()
    while (yield from r.literal(",")):
        if (yield from _key(r)) is None or not (yield from r.value(ignore)):
            return
        yield from r.spaces()
    yield from r.spaces("}")


def _key(r: Reader) -> Steps[str | None]:
    yield from r.spaces()
    key = yield from r.string()
    yield from r.spaces()
    colon = yield from r.literal(":")
    yield from r.spaces()
    return key if colon else None
