"""Calls in Python's syntax, `[f(a="x"), g()]`, as in Llama 4. A call is reported when it is complete."""

import ast
import json
import re
import warnings
from collections.abc import Container
from typing import Any, Final

from components.output.reader import Reader, Steps

START, END = "<|python_start|>", "<|python_end|>"
LONGEST: Final = 65536  # characters, for Python's parser
JSON_NAMES: Final = {"true": True, "false": False, "null": None}  # models mix up the two languages
_SURROGATES: Final = re.compile("[\ud800-\udfff]")


def pythonic(r: Reader) -> Steps[None]:
    r.hold()
    yield from r.spaces()
    yield from r.literal(START)
    if not ((yield from r.literal("[")) and (yield from _calls(r))):
        r.give_back()
    yield from r.until([], r.emit_text)


def _calls(r: Reader) -> Steps[bool]:
    """Read the calls and the list's end. False, without consuming text, if anything else follows."""
    while True:
        yield from r.spaces()
        call = _read((yield from _source(r)), r.tools)
        if call is None:
            return False
        name, arguments = call
        r.begin_call(name)
        r.argue(arguments)
        r.end_call()
        yield from r.spaces()
        r.hold()
        if not (yield from r.literal(",")):
            yield from r.literal("]")
            yield from r.closing(END)
            r.release()
            return True


def _source(r: Reader) -> Steps[str]:
    """Skip `name(…)`, with strings and brackets. Return its source; "" for anything else."""
    source: list[str] = []
    depth = 0
    quote = ""
    while char := (yield from r.char()):
        r.skip()
        source.append(char)
        if quote:
            if char == "\\":
                source.append((yield from r.char()))
                r.skip(len(source[-1]))
            elif char == quote:
                quote = ""
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if not depth:
                return "".join(source)
        elif not depth and not (char.isalnum() or char in "_.-"):
            return ""
        elif char in "'\"":
            quote = char
    return ""


def _read(source: str, tools: Container[str]) -> tuple[str, str] | None:
    name, _, rest = source.partition("(")
    if name not in tools:
        return None
    try:
        call = _parse(f"f({rest}")
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            return None
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        return name, as_json(arguments)
    except (ValueError, TypeError, RecursionError):
        return None


def as_json(value: Any) -> str:
    """Surrogate pairs, which models write as escapes, become characters.

    Raises: ValueError, TypeError, RecursionError.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if not _SURROGATES.search(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # a lone surrogate becomes U+FFFD


class _JsonNames(ast.NodeTransformer):
    """Reads JSON's names of constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.copy_location(ast.Constant(JSON_NAMES[node.id]), node) if node.id in JSON_NAMES else node


def python_value(source: str) -> Any:
    """Raises: ValueError, RecursionError."""
    return ast.literal_eval(_parse(source))


def _parse(source: str) -> ast.expr:
    if len(source) > LONGEST:
        raise ValueError("too long to parse")
    try:
        with warnings.catch_warnings(action="ignore"):  # invalid escapes
            parsed: ast.Expression = _JsonNames().visit(ast.parse(source, mode="eval"))
            return parsed.body
    except (SyntaxError, MemoryError) as exc:
        raise ValueError("not valid Python") from exc
