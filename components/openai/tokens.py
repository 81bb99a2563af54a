"""`/tokenize` and `/detokenize`, as in vLLM."""

from typing import Annotated, Final

from pydantic import BaseModel, Field, JsonValue, PlainValidator

from components.errors import Rejected
from components.openai.chat import (
    MAX_MESSAGES,
    Conversation,
    Message,
    chars_of_calls,
    check_ending,
    check_messages,
    check_tools,
    ending_of,
    for_templates,
)
from components.openai.completions import token_ids
from components.openai.fields import Strict
from components.openai.tools import MAX_TOOLS, Tool

MAX_TOKENS: Final = 1 << 19  # per request to detokenize


def _ids(value: JsonValue) -> list[int]:
    return token_ids(value) if value != [] else []


class TokenizeRequest(Strict):
    """A request with either `prompt` or `messages`."""

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None  # None: the first one served
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None  # default: true for a prompt, false for messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: Annotated[dict[str, JsonValue], Field(max_length=16)] | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise Rejected("Send either 'prompt' or 'messages'.", param="prompt")
        for name in ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs"):
            if self.messages is None and getattr(self, name) is not None:
                raise Rejected(f"'{name}' is only allowed with 'messages'.", param=name)
        check_ending(self.messages or (), add=self.add_generation_prompt, continue_last=self.continue_final_message)
        check_messages(self.messages or ())
        check_tools(self.tools or (), None)

    def conversation(self) -> Conversation:
        ending = ending_of(self.add_generation_prompt, self.continue_final_message, self.add_special_tokens)
        return Conversation(
            for_templates(self.messages or ()),
            self.tools or (),
            variables=self.chat_template_kwargs or {},
            ending=ending,
            call_chars=chars_of_calls(self.messages or ()),
        )


class Tokenized(BaseModel):
    """`token_strs` are the names in the tokenizer's vocabulary."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Strict):
    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    tokens: Annotated[list[int], PlainValidator(_ids, json_schema_input_type=list[int]), Field(max_length=MAX_TOKENS)]


class Detokenized(BaseModel):
    """The text, with special tokens."""

    prompt: str
