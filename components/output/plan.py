"""How one request's texts are parsed."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from components.output.formats import ReasoningFormat, ToolFormat
from components.output.parser import ContinuingParser, OutputParser
from components.output.reader import Reader, Schema
from components.output.reasoning import Reasoning


@dataclass(frozen=True, slots=True)
class OutputPlan:
    reasoning: ReasoningFormat | None
    opened: bool  # the text begins within reasoning
    tools: ToolFormat | None
    offered: Mapping[str, Schema] = field(default_factory=dict)  # parameters by tool name
    single: bool = False  # one call ends the answer
    shown: frozenset[int] = frozenset()  # special tokens of either format
    before: str = ""  # the model continues this text

    def parser(self, *, reports_before: bool = False) -> OutputParser:
        """`reports_before`: report the parts of `before`, too."""
        reasoning, tools = self.reasoning, self.tools
        thoughts = None if reasoning is None else Reasoning(reasoning.begin, reasoning.end, opened=self.opened)
        calls = None if tools is None else Reader(tools.read, self.offered, tools.new_id, single=self.single)
        if not self.before:
            return OutputParser(thoughts, calls)
        return ContinuingParser(thoughts, calls, self.before, reports_before=reports_before)
