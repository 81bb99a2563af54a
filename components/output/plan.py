"""What the texts of one request are to be taken apart into, decided once."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from components.output.formats import ReasoningFormat, ToolFormat
from components.output.parser import OutputParser
from components.output.reader import Reader, Schema
from components.output.reasoning import Reasoning


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """Makes a parser for each choice."""

    reasoning: ReasoningFormat | None
    opened: bool  # the prompt ends within reasoning
    tools: ToolFormat | None
    offered: Mapping[str, Schema] = field(default_factory=dict)  # parameters by the tools' names
    single: bool = False  # one call ends the answer
    shown: frozenset[int] = frozenset()  # special tokens that are part of either format

    def parser(self) -> OutputParser:
        """A fresh one."""
        reasoning, tools = self.reasoning, self.tools
        return OutputParser(
            None if reasoning is None else Reasoning(reasoning.begin, reasoning.end, opened=self.opened),
            None if tools is None else Reader(tools.read, self.offered, tools.new_id, single=self.single),
        )
