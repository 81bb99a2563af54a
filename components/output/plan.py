"""The plan by which one request's texts are parsed."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from components.output.formats import ReasoningFormat, ToolFormat, call_id
from components.output.parser import ContinuingParser, OutputParser
from components.output.reader import Reader, Schema
from components.output.reasoning import Reasoning


@dataclass(frozen=True, slots=True)
class OutputPlan:
    reasoning: ReasoningFormat | None
    opened: bool  # whether the text begins within reasoning
    tools: ToolFormat | None
    offered: Mapping[str, Schema] = field(default_factory=dict)  # parameters by tool name
    single: bool = False  # whether the answer ends after one call
    shown: frozenset[int] = frozenset()  # special tokens of both formats, which the detokenizer must output
    before: str = ""  # earlier text that the model continues

    def parser(self, *, reports_before: bool = False) -> OutputParser:
        """Return a new parser. `reports_before`: whether it also reports the parts of `before`."""
        reasoning, tools = self.reasoning, self.tools
        thoughts, read = None, None if tools is None else tools.read
        if reasoning is not None and reasoning.read is not None:
            read = reasoning.read
        elif reasoning is not None:
            thoughts = Reasoning(reasoning.begin, reasoning.end, opened=self.opened)
        new_id = call_id if tools is None else tools.new_id
        calls = None if read is None else Reader(read, self.offered, new_id, single=self.single)
        if not self.before:
            return OutputParser(thoughts, calls)
        return ContinuingParser(thoughts, calls, self.before, reports_before=reports_before)
