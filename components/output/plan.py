"""The plan by which one request's texts are parsed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from components.output.formats import ReasoningFormat, ToolFormat, call_id
from components.output.parser import ContinuingParser, OutputParser
from components.output.reader import Reader, Schema
from components.output.reasoning import CallsWithin, Reasoning


@dataclass(frozen=True, slots=True)
class OutputPlan:
    reasoning: ReasoningFormat | None
    opened: bool  # the text begins within reasoning
    tools: ToolFormat | None
    offered: Mapping[str, Schema] = field(default_factory=dict)  # parameters by tool name
    single: bool = False  # the answer ends after one call
    shown: frozenset[int] = frozenset()  # special tokens that the detokenizer must output
    before: str = ""  # earlier text that the model continues
    free: bool = False  # no constraint applies, so a call may end the reasoning

    def parser(self, *, reports_before: bool = False) -> OutputParser:
        """`reports_before`: also report the parts of `before`."""
        reasoning, tools = self.reasoning, self.tools
        thoughts, within, read = None, None, None if tools is None else tools.read
        if reasoning is not None and reasoning.read is not None:
            read = reasoning.read
        new_id = call_id if tools is None else tools.new_id
        new_reader = None if read is None else partial(Reader, read, self.offered, new_id, single=self.single)
        if self.free and tools is not None and tools.tokens and new_reader is not None:
            within = CallsWithin(tools.tokens[0], new_reader)
        if reasoning is not None and reasoning.read is None:
            thoughts = Reasoning(reasoning.begin, reasoning.end, opened=self.opened, calls=within)
        calls = None if new_reader is None else new_reader()
        if not self.before:
            return OutputParser(thoughts, calls)
        return ContinuingParser(thoughts, calls, self.before, reports_before=reports_before)
