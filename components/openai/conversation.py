"""A conversation with a model, by whichever route it came."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import JsonValue

from components.openai.tools import Tool, ToolChoice
from components.text.ending import Ending

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a prompt is made from, and what the answer may be."""

    messages: list[dict[str, Any]]  # as chat templates know them
    tools: Sequence[Tool] = ()  # to choose from
    choice: ToolChoice = ToolChoice("auto")  # noqa: RUF009  # a tuple
    parallel: bool = True  # whether one answer may call several times
    effort: Effort | None = None  # of the reasoning; None: as the model does it
    variables: Mapping[str, JsonValue] = field(default_factory=dict)  # that the client sets in the template
    ending: Ending = Ending()  # noqa: RUF009  # a tuple

    @property
    def begun(self) -> str:
        """The text that the answer goes on from; "" when it is a turn of its own."""
        return str(self.messages[-1]["content"]) if self.ending.continue_last else ""


def name_answers(messages: Sequence[dict[str, Any]]) -> None:
    """Give each message of a tool the name of what it answers, which some templates ask for and clients leave out."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]
