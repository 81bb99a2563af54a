"""What a model may write, as a grammar in llguidance's Lark: calls of tools in its own format, held to their parameters.

Source: llguidance's docs/syntax.md. A special token is written `<[id]>`, as only so it stands for itself.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from llguidance import regex_to_lark

from components.output.reader import Schema
from components.structured.grammar import ASCII, WHITESPACE

MAX_CALLS: Final = 32  # in one answer that is held to calls: a small model would go on for ever
TEXT: Final = r"/(?s:.*)/"
JSON_STYLE: Final = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How a format writes calls: `before`, the calls with `separator` in between, `after`; `{}` is the name."""

    head: str  # up to the arguments
    tail: str
    separator: str
    before: str = ""
    after: str = ""
    marker: str = ""  # what the first call begins with, and no answer does; "": no answer begins with a bracket


class CallableTool(NamedTuple):
    """A tool as far as a grammar goes."""

    name: str
    parameters: Schema | None
    strict: bool


class Thinking(NamedTuple):
    """Reasoning before anything else."""

    begin: str
    end: str
    opened: bool  # by the prompt


class Grammar:
    """Rules, put together one by one."""

    def __init__(self, special: Mapping[str, int]) -> None:
        """`special`: ids of the special tokens that formats are made of."""
        self._special = special
        self._pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
        self._rules = ["%llguidance {}"]

    def knows(self, token: str) -> bool:
        """Whether that is one of the special tokens."""
        return token in self._special

    def text(self, start: str) -> str:
        """The grammar."""
        return "\n".join([*self._rules, f"start: {start}"])

    def rule(self, name: str, body: str) -> str:
        """Add a rule. Returns: its name."""
        self._rules.append(f"{name}: {body}")
        return name.partition("[")[0]

    def literal(self, text: str) -> str:
        """Exactly that."""
        atoms = []
        at = 0
        for match in self._pattern.finditer(text):
            atoms += [_quoted(text[at : match.start()]), f"<[{self._special[match[0]]}]>"]
            at = match.end()
        return " ".join(atom for atom in [*atoms, _quoted(text[at:])] if atom)

    def up_to(self, name: str, marker: str) -> str:
        """Any text, and `marker` behind it."""
        if marker in self._special:
            return f"{self.rule(name.upper(), TEXT)} <[{self._special[marker]}]>"
        return self.rule(f"{name}[lazy]", rf"/(?s:.*){_escaped(marker)}/")

    def calls(self, style: CallStyle, tools: Sequence[CallableTool], *, single: bool, within_text: bool = False) -> str:
        """One call or several; `within_text`: without the marker of the first, which is there already."""
        before, head = style.before, style.head
        if within_text:
            before, head = before.removeprefix(style.marker), head if before else head.removeprefix(style.marker)
        call = self.rule("call", " | ".join(self._call(f"call_{i}", style, head, tool) for i, tool in enumerate(tools)))
        further = f"({self.literal(style.separator)} {call}){{0,{MAX_CALLS - 1}}}"
        several = not single and not (within_text and not style.before)  # there text stands between them
        return " ".join(
            part for part in (self.literal(before), call, further if several else "", self.literal(style.after)) if part
        )

    def _call(self, name: str, style: CallStyle, head: str, tool: CallableTool) -> str:
        arguments = self.rule(f"{name}_arguments", f"%json {json.dumps(_schema(tool), ensure_ascii=False)}")
        parts = (self.literal(head.replace("{}", tool.name)), arguments, self.literal(style.tail))
        return self.rule(name, " ".join(part for part in parts if part))

    def thinking(self, thinking: Thinking | None) -> str:
        """What may stand before everything else, with a space behind it."""
        if thinking is None:
            return ""
        thought = self.up_to("thought", thinking.end)
        spaces = self.rule("SPACES", r"/[ \n]{0,4}/")
        whole = f"{thought} {spaces}" if thinking.opened else f"({self.literal(thinking.begin)} {thought} {spaces})?"
        return f"{whole} "


def forced_calls(
    grammar: Grammar, style: CallStyle, tools: Sequence[CallableTool], thinking: Thinking | None, *, single: bool
) -> str:
    """Calls and nothing else."""
    return grammar.text(grammar.thinking(thinking) + grammar.calls(style, tools, single=single))


def strict_calls(
    grammar: Grammar, style: CallStyle, tools: Sequence[CallableTool], thinking: Thinking | None, *, single: bool
) -> str:
    """Any text; where it calls, held to the tools."""
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
    """An answer by the rule `answer`, which `answer_rule` makes of a constraint, or, with `style`, calls."""
    before = grammar.thinking(thinking)
    either = grammar.rule("answer", answer)
    if style is not None:
        either = f"({either} | {grammar.calls(style, tools, single=single)})"
    return grammar.text(before + either)


def answer_rule(kind: str, text: str) -> str:
    """The body of a rule for what a constraint of this kind says."""
    if kind == "json_schema":
        schema = json.loads(text)
        style = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
        return f"%json {json.dumps({**schema, **style} if isinstance(schema, dict) else schema, ensure_ascii=False)}"
    if kind == "regex":
        return f"/{regex_to_lark(text, ASCII)}/"
    return f"%lark {{\n{text}\n}}"


def _schema(tool: CallableTool) -> dict[str, Any]:
    """The tool's parameters as the compiler takes them: tools that are not strict are held to what of them can be kept."""
    schema: dict[str, Any] = dict(tool.parameters or {"type": "object", "properties": {}})
    schema.setdefault("type", "object")
    whole = schema.keys() & {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
    if "properties" in schema and not whole:
        schema["additionalProperties"] = False  # a model that may make up parameters does
    return {**schema, "x-guidance": JSON_STYLE if tool.strict else {**JSON_STYLE, "lenient": True}}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _escaped(text: str) -> str:
    """As a regular expression between slashes."""
    return re.sub(r"([][(){}.*+?|^$\\/#&~-])", r"\\\1", text)
