"""A conversation with a model, for all dialects."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import JsonValue

from components.openai.tools import Tool, ToolChoice
from components.text.ending import Ending

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: list[dict[str, Any]]  # in the form of chat templates
    tools: Sequence[Tool] = ()  # to choose from
    choice: ToolChoice = ToolChoice("auto")  # noqa: RUF009  # a tuple
    parallel: bool = True  # whether one answer may have several calls
    effort: Effort | None = None  # of reasoning; None: the model's default
    variables: Mapping[str, JsonValue] = field(default_factory=dict)  # of the template, set by the client
    ending: Ending = Ending()  # noqa: RUF009  # a tuple

    @property
    def begun(self) -> str:
        """The text that the answer continues; "" if it is a turn of its own."""
        return str(self.messages[-1]["content"]) if self.ending.continue_last else ""


def name_answers(messages: Sequence[dict[str, Any]]) -> None:
    """Set the tool name of each tool message, which some templates need and clients leave out."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]
