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
    tools: Sequence[Tool] = ()
    choice: ToolChoice = ToolChoice("auto")  # noqa: RUF009  # a tuple
    parallel: bool = True  # several calls in one answer
    effort: Effort | None = None  # None: the model's default
    variables: Mapping[str, JsonValue] = field(default_factory=dict)  # of the template, set by the client
    ending: Ending = Ending()  # noqa: RUF009  # a tuple

    @property
    def begun(self) -> str:
        """The text that the answer continues."""
        return str(self.messages[-1]["content"]) if self.ending.continue_last else ""


def name_answers(messages: Sequence[dict[str, Any]]) -> None:
    """Set the tool name of tool messages: some templates need it, and clients omit it."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]
