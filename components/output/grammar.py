"""Grammars of answers in llguidance's Lark: tool calls in the model's format, with the tools' parameters.

A special token is written `<[id]>`, because its text would match other tokens. Source: llguidance's docs/syntax.md.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from llguidance import regex_to_lark

from components.output.reader import Schema
from components.structured.grammar import ASCII, WHITESPACE, as_lark
from components.wire.sampling import Constraint

MAX_CALLS: Final = 32  # limit in an answer that must consist of calls, because a small model might never stop
TEXT: Final = r"/(?s:.*)/"
JSON_STYLE: Final = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


@dataclass(frozen=True, slots=True)
class CallStyle:
    """An answer's calls: `before`, calls separated by `separator`, `after`. `{}` is replaced by the name."""

    head: str  # text of a call before its arguments
    tail: str
    separator: str
    before: str = ""
    after: str = ""
    # Starts the first call and no other answer. Without one, no other answer starts with a bracket.
    marker: str = ""


@dataclass(frozen=True, slots=True)
class MessageStyle:
    """An answer in several messages: any number of others, then one with the answer or a call."""

    others: tuple[str, ...]  # their beginnings
    end: str  # of a message that another one follows
    next: str  # text between `end` and the next message
    answer: str  # beginning of its message


class CallableTool(NamedTuple):
    name: str
    parameters: Schema | None
    strict: bool


class Thinking(NamedTuple):
    begin: str
    end: str
    opened: bool  # the prompt ends with `begin`
    messages: MessageStyle | None = None  # if set, reasoning is in messages of this form


class Grammar:
    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
        self._rules = ["%llguidance {}"]

    def knows(self, token: str) -> bool:
        return token in self._special

    def text(self, start: str) -> str:
        return "\n".join([*self._rules, f"start: {start}"])

    def rule(self, name: str, body: str) -> str:
        self._rules.append(f"{name}: {body}")
        return name.partition("[")[0]

    def literal(self, text: str) -> str:
        atoms = []
        at = 0
        for match in self._pattern.finditer(text):
            atoms += [_quoted(text[at : match.start()]), f"<[{self._special[match[0]]}]>"]
            at = match.end()
        return " ".join(atom for atom in [*atoms, _quoted(text[at:])] if atom)

    def up_to(self, name: str, marker: str) -> str:
        if marker in self._special:
            return f"{self.rule(name.upper(), TEXT)} <[{self._special[marker]}]>"
        return self.rule(f"{name}[lazy]", rf"/(?s:.*){_escaped(marker)}/")

    def calls(self, style: CallStyle, tools: Sequence[CallableTool], *, single: bool, within_text: bool = False) -> str:
        """`within_text`: the first call's marker has already been matched."""
        before, head = style.before, style.head
        if within_text:
            before, head = before.removeprefix(style.marker), head if before else head.removeprefix(style.marker)
        call = self.rule("call", " | ".join(self._call(f"call_{i}", style, head, tool) for i, tool in enumerate(tools)))
        further = f"({self.literal(style.separator)} {call}){{0,{MAX_CALLS - 1}}}"
        several = not single and not (within_text and not style.before)  # within text, text separates the calls
        return " ".join(
            part for part in (self.literal(before), call, further if several else "", self.literal(style.after)) if part
        )

    def _call(self, name: str, style: CallStyle, head: str, tool: CallableTool) -> str:
        arguments = self.rule(f"{name}_arguments", f"%json {json.dumps(_schema(tool), ensure_ascii=False)}")
        parts = (self.literal(head.replace("{}", tool.name)), arguments, self.literal(style.tail))
        return self.rule(name, " ".join(part for part in parts if part))

    def thinking(self, thinking: Thinking | None) -> str:
        if thinking is None:
            return ""
        if (style := thinking.messages) is not None:
            heads = " | ".join(map(self.literal, style.others))
            content = self.up_to("content", style.end)
            return f"({self.rule('other', f'({heads}) {content} {self.literal(style.next)}')})* "
        thought = self.up_to("thought", thinking.end)
        spaces = self.rule("SPACES", r"/[ \n]{0,4}/")
        whole = f"{thought} {spaces}" if thinking.opened else f"({self.literal(thinking.begin)} {thought} {spaces})?"
        return f"{whole} "


def forced_calls(
    grammar: Grammar, style: CallStyle, tools: Sequence[CallableTool], thinking: Thinking | None, *, single: bool
) -> str:
    return grammar.text(grammar.thinking(thinking) + grammar.calls(style, tools, single=single))


def strict_calls(
    grammar: Grammar, style: CallStyle, tools: Sequence[CallableTool], thinking: Thinking | None, *, single: bool
) -> str:
    before = grammar.thinking(thinking)
    if style.marker:
        lead = grammar.up_to("lead", style.marker)
        group = grammar.rule("group", f"{lead} {grammar.calls(style, tools, single=single, within_text=True)}")
        return grammar.text(f"{before}{group}{'?' if single else '*'} {grammar.rule('REST', TEXT)}")
    other = grammar.rule("OTHER", r"/([^{\[\s](?s:.*))?/")
    return grammar.text(f"{before}({other} | {grammar.calls(style, tools, single=single)})")


def calls_or(
    grammar: Grammar,
    style: CallStyle | None,
    tools: Sequence[CallableTool],
    thinking: Thinking | None,
    answer: str,
    *,
    single: bool,
) -> str:
    """`answer`: from `answer_rule`, or TEXT. A `style` also allows calls."""
    before = grammar.thinking(thinking)
    either = grammar.rule("answer", answer)
    if thinking is not None and thinking.messages is not None:
        either = f"{grammar.literal(thinking.messages.answer)} {either}"
    if style is not None:
        either = f"({either} | {grammar.calls(style, tools, single=single)})"
    return grammar.text(before + either)


def answer_rule(kind: str, text: str) -> str:
    """Raises: ValueError, for an invalid pattern or grammar."""
    if kind == "json_schema":
        schema = json.loads(text)
        style = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
        return f"%json {json.dumps({**schema, **style} if isinstance(schema, dict) else schema, ensure_ascii=False)}"
    if kind == "regex":
        return f"/{regex_to_lark(text, ASCII)}/"
    return f"%lark {{\n{as_lark(Constraint(kind='lark', text=text)).text}\n}}"


def _schema(tool: CallableTool) -> dict[str, Any]:
    """A tool's parameters in the compiler's form. If not strict, it ignores unsupported keywords."""
    schema: dict[str, Any] = dict(tool.parameters or {"type": "object", "properties": {}})
    schema.setdefault("type", "object")
    whole = schema.keys() & {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
    properties = schema.get("properties")
    if isinstance(properties, dict) and not whole and properties.keys() >= set(schema.get("required", ())):
        schema["additionalProperties"] = False  # otherwise models invent parameters
    schema["title"] = tool.name  # for the compiler's error
    return {**schema, "x-guidance": JSON_STYLE if tool.strict else {**JSON_STYLE, "lenient": True}}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _escaped(text: str) -> str:
    return re.sub(r"([][(){}.*+?|^$\\/#&~-])", r"\\\1", text)
