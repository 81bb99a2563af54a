"""Checks a constraint by compiling it and taking a few steps."""

import json
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from pydantic_core import from_json

from components.structured.grammar import as_lark, fault_of, start_matcher
from components.structured.mask import GrammarMask
from components.structured.schema import fault_in_schema
from components.wire.sampling import Constraint

STEPS: Final = 32  # tokens of a random text; most expensive constraints show early
LONGEST_REASON: Final = 300
NOT_KEPT: Final = re.compile(r"^[a-z_]\w*\[[^\]\n]*\b(temperature)\s*=", re.MULTILINE)
JSON_BEGINS: Final = re.compile(r"%json\s*(?={)")
DECODER: Final = json.JSONDecoder()
REGEX_FAULT: Final = re.compile(r"regex parse error:.*?\nerror: ([^\n]+)", re.DOTALL)
REWORDINGS: Final = (  # part of llguidance's message, our text; the first match is used
    ("coerce_one_of", "'oneOf' is supported only for schemas that exclude one another; use 'anyOf'"),
    ("NoExtension", "there is nothing that satisfies it"),
    ("unknown special token", "it contains a special token that this model does not have"),
    ("recursion limit exceeded", "it is nested too deeply"),
    ("is not present in a registry", "'$ref' and '$schema' may not refer to anything outside the schema"),
    ("Unimplemented keys", "it has keywords that are not supported: {}"),
    ("items; max is", "it leaves too many ways open at once: {}"),
    ("Too many items", "it leaves too many ways open at once"),
    ("fuel", "it is too complex"),
    ("too many expressions", "it is too complex"),
    ("too large", "it is too complex"),
    ("too big", "it is too complex"),
)


class Unusable(Exception):
    """The message completes a sentence that names the constraint."""


def check(vocabulary: LLTokenizer, constraint: Constraint) -> Constraint:
    """Return the constraint in the form for the wire. Raises: Unusable."""
    if constraint.kind == "json_schema":
        _check_schema(constraint.text)
    elif constraint.kind == "lark":
        _check_lark(constraint.text)
    try:
        constraint = as_lark(constraint)
        matcher = start_matcher(vocabulary, constraint)
    except ValueError as exc:
        raise Unusable(_reworded(str(exc))) from exc
    if matcher.is_error():
        raise Unusable(_fault_of_titled(vocabulary, constraint) or _reworded(matcher.get_error()))
    _try_out(vocabulary, matcher)
    return constraint


def _check_schema(text: str) -> None:
    try:
        schema = from_json(text, allow_inf_nan=False)
    except ValueError as exc:
        raise Unusable(f"it is not valid JSON: {exc}") from exc
    if (fault := fault_in_schema(schema)) is not None:
        raise Unusable(fault)


def _check_lark(text: str) -> None:
    """Refuse options that the compiler would ignore. A nested schema may set `lenient`."""
    if (option := NOT_KEPT.search(text)) is not None:
        raise Unusable(f"the option '{option[1]}' of a rule is not supported")
    for schema in _schemas_in(text):
        style = schema.pop("x-guidance", None)
        lenient = isinstance(style, dict) and style.get("lenient")
        if not lenient and (fault := fault_in_schema(schema)) is not None:
            raise Unusable(f"in a nested schema, {fault}")


def _schemas_in(text: str) -> Iterator[dict[str, Any]]:
    for begin in JSON_BEGINS.finditer(text):
        # text that is not JSON is a comment, or a fault that the compiler reports
        with suppress(ValueError, RecursionError):
            yield DECODER.raw_decode(text, begin.end())[0]


def _fault_of_titled(vocabulary: LLTokenizer, constraint: Constraint) -> str | None:
    """The fault of a nested schema, with its title (a tool's name). None: each compiles on its own."""
    for schema in _schemas_in(constraint.text) if constraint.kind == "lark" else ():
        if isinstance(title := schema.get("title"), str):
            matcher = start_matcher(vocabulary, Constraint(kind="lark", text=f"start: %json {json.dumps(schema)}"))
            if matcher.is_error():
                return f"in the schema of '{title[:64]}', {_reworded(matcher.get_error())}"
    return None


def _try_out(vocabulary: LLTokenizer, matcher: LLMatcher) -> None:
    """Only random allowed tokens reveal too expensive masks."""
    num_words = -(-vocabulary.vocab_size // 32)
    mask = GrammarMask(matcher, num_words)
    words = np.zeros(num_words, dtype=np.int32)
    chance = random.Random(0)
    for _ in range(STEPS):
        mask.fill(words)
        if (fault := fault_of(matcher)) is not None:
            raise Unusable(_reworded(fault))
        if mask.is_complete:
            return
        (allowed,) = np.nonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        mask.accept(int(allowed[int(len(allowed) * chance.random() ** 4)]))


def _reworded(reason: str) -> str:
    if (wrong := REGEX_FAULT.search(reason)) is not None:
        return f"invalid regex: {wrong[1]}"
    shown = reason.partition("\n")[0][:LONGEST_REASON]
    return next((text.format(shown) for sign, text in REWORDINGS if sign in reason), shown)
