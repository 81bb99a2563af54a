"""A model's chat template and tokenizer, without torch."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self, TypeVar

from jinja2 import TemplateError
from pydantic_core import from_json
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from components.errors import Rejected
from components.output.formats import FormatOptions, OutputFormats
from components.output.template_names import variables_of
from components.text.chat_template import NEXT_TURN, Ending, described, in_messages, instructed, numbered
from components.text.detokenizer import (
    REPLACEMENT,
    ByteDetokenizer,
    Detokenizer,
    Pieces,
    SelectiveDetokenizer,
    StreamDetokenizer,
    TokenBytes,
    is_byte_level,
)
from components.text.encoder import Encoder, LongPrompts
from components.text.tokenizer_file import check_tokenizer_file

T = TypeVar("T")

INLINE_CHARS: Final = 4096  # 0.4 ms at worst; a hop to a thread and back costs about 0.1 ms
MESSAGE_CHARS: Final = 32  # what a template adds per message
CONTEXT_TOKENS: Final = 6  # of the prompt, as a decoder's context
MAX_CONTEXT_TOKENS: Final = 32  # if the prompt ends with characters of several tokens
TAIL_TOKENS: Final = 16  # of the prompt, enough for a marker and line breaks
NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
TEMPLATE_ERRORS: Final = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
A_QUESTION: Final[Sequence[Mapping[str, Any]]] = ({"role": "user", "content": "a"},)
A_CALL: Final[Sequence[Mapping[str, Any]]] = (
    *A_QUESTION,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}},
        ],
    },
    {"role": "tool", "content": "c", "tool_call_id": "abcdefghi", "name": "f"},
)


class TextModel:
    """Shared by all requests and threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str | None,
        special_tokens: Mapping[str, str] | None = None,
        tool_template: str | None = None,
        options: FormatOptions = FormatOptions(),  # noqa: B008  # frozen
        *,
        ends: Set[int] = frozenset(),
    ) -> None:
        """`tool_template` is for requests with tools; `ends` are the model's end tokens. Raises: ValueError."""
        self.ends = frozenset(ends)
        self.formats = OutputFormats.of(tool_template or chat_template or "", options)
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()  # tokenizer.json may enable truncation and padding
        self._tokenizer.no_padding()
        self._encoder = Encoder(tokenizer)
        self._is_byte_level = is_byte_level(tokenizer)
        self._pieces_by_shown: dict[frozenset[int] | None, Pieces] = {}  # None: all are shown
        self._chat_template = chat_template
        self._tool_template = tool_template or chat_template
        self._special_tokens = dict(special_tokens or {})  # for templates: bos_token, eos_token
        self._long_prompts = LongPrompts()
        self.vocab_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def load(
        cls,
        directory: Path,
        options: FormatOptions = FormatOptions(),  # noqa: B008  # frozen
        *,
        ends: Set[int] = frozenset(),
    ) -> Self:
        """Raises: WrongSettings, without a tokenizer.json; ValueError if `options` do not fit the template."""
        check_tokenizer_file(directory)
        loaded = PreTrainedTokenizerFast.from_pretrained(directory)
        template = loaded.chat_template
        several = template if isinstance(template, dict) else {}  # by name
        if several:
            template = several.get("default")
        specials, tools = loaded.special_tokens_map, several.get("tool_use")
        return cls(loaded.backend_tokenizer, template, specials, tools, options, ends=ends)

    def warm_up(self) -> None:
        """Encode a short conversation, or a plain text if the template refuses it.

        The first one compiles the template, and `fastokens` sets itself up per thread: 30 ms together.
        """
        try:
            self._encode_chat(A_QUESTION, (), NOTHING, NEXT_TURN)
        except Rejected:
            self._encode("a", add_special_tokens=True)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        return TokenBytes(self._tokenizer)

    def mentions(self, variable: str) -> bool:
        return variable in variables_of(self._chat_template or "")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = NOTHING,
        ending: Ending = NEXT_TURN,
    ) -> str:
        """A conversation's prompt text.

        Args:
            messages: arguments of tool calls are objects.
            tools: JSON schemas.
        Raises: Rejected, with the template's reason.
        """
        if self._chat_template is None:
            raise Rejected(
                "This model has no chat template, so it cannot hold a conversation; use /v1/completions.", param="model"
            )
        if self.formats.instructed:
            messages, tools = instructed(messages, tools), ()
        elif (reasoning := self.formats.reasoning) is not None and reasoning.messages is not None:
            messages, tools = in_messages(messages), described(tools)
        elif self._calls_as_text:
            messages = [_with_arguments(message, _as_text) for message in messages]
        elif any("tool_calls" in message for message in messages) and not self._accepts_text_arguments:
            messages = [_with_arguments(message, _as_object) for message in messages]
        if self.formats.tools is not None and self.formats.tools.name == "kimi_k2":
            messages = numbered(messages)
        try:
            return self._render(messages, tools, variables, ending)
        except TEMPLATE_ERRORS as exc:
            # a template is foreign code: unexpected messages may raise any of these
            raise Rejected(f"The model's chat template refuses these messages: {exc}", param="messages") from exc

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        ending: Ending = NEXT_TURN,
    ) -> str:
        rendered, _ = render_jinja_template(
            [list(messages)],
            tools=list(tools) or None,
            chat_template=self._tool_template if tools else self._chat_template,
            add_generation_prompt=ending.open_turn,
            continue_final_message=ending.continue_last,
            **{**variables, **self._special_tokens},
        )
        text: str = rendered[0]
        return text

    @cached_property
    def _calls_as_text(self) -> bool:
        """Return whether the template needs arguments as JSON text, as DeepSeek's does."""
        return self._accepts_text_arguments and not self._accepts(A_CALL)

    @cached_property
    def _accepts_text_arguments(self) -> bool:
        """Whether arguments that are not JSON can be shown as they are. GLM's and Qwen3-Coder's templates need objects."""
        return self._accepts([_with_arguments(message, _as_text) for message in A_CALL])

    def _accepts(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        try:
            self._render(messages, (), {})
        except TEMPLATE_ERRORS:
            return False
        return True

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = NOTHING,
        ending: Ending = NEXT_TURN,
        call_chars: int = 0,
    ) -> list[int]:
        """`call_chars`: of calls' arguments, whose parsed form is slow to measure."""
        chars = sum(MESSAGE_CHARS + len(str(m.get("content", ""))) for m in messages)
        if tools or any("tool_calls" in message for message in messages):
            num_calls = sum(len(m.get("tool_calls", ())) for m in messages)
            chars += len(str(tools)) + num_calls * MESSAGE_CHARS + call_chars
        return await self.run(chars, lambda: self._encode_chat(messages, tools, variables, ending))

    async def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return await self.run(len(text), lambda: self._encode(text, add_special_tokens=add_special_tokens))

    async def run(self, chars: int, work: Callable[[], T]) -> T:
        return work() if chars <= INLINE_CHARS else await self._long_prompts.run(chars, work)

    def decode(self, token_ids: Sequence[int], *, skip: bool = True) -> str:
        # only the batch call releases the GIL
        [text] = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip)
        return text

    def names(self, token_ids: Sequence[int]) -> list[str]:
        """Names in the vocabulary; "" for an id without a token."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def detokenizer(
        self, prompt: Sequence[int] = (), shown: Set[int] = frozenset(), *, skip: bool = True
    ) -> Detokenizer:
        """`prompt`: what the generation continues; `shown`: special tokens to show; without `skip`, all."""
        if self._is_byte_level:
            return ByteDetokenizer(self._pieces(frozenset(shown), skip=skip), prompt[-CONTEXT_TOKENS:])
        context = self._context(prompt)
        if shown and skip:
            return SelectiveDetokenizer(self._tokenizer, self.specials - shown, context)
        return StreamDetokenizer(self._tokenizer, context, skip=skip)

    def _context(self, prompt: Sequence[int]) -> Sequence[int]:
        """The prompt's last tokens, from the beginning of a character.

        The tokenizer decodes a run of bytes to "\ufffd" alone if one character in it is cut.
        """
        for count in range(min(CONTEXT_TOKENS, len(prompt)), min(MAX_CONTEXT_TOKENS, len(prompt)) + 1):
            context = prompt[len(prompt) - count :]
            if REPLACEMENT not in self.decode(context, skip=False):
                return context
        # The prompt ends within a character, or with "\ufffd" itself. After any token, a first word keeps its space.
        whole = ([i] for i in prompt[: -MAX_CONTEXT_TOKENS - 1 : -1] if REPLACEMENT not in self.decode([i], skip=False))
        return next(whole, ())

    def _pieces(self, shown: frozenset[int], *, skip: bool) -> Pieces:
        key = shown if skip else None
        if key not in self._pieces_by_shown:
            skipped = self.specials - shown if skip else frozenset[int]()
            self._pieces_by_shown[key] = Pieces(self._tokenizer, skipped)
        return self._pieces_by_shown[key]

    def special_ids(self, names: Collection[str]) -> frozenset[int]:
        return frozenset(i for name in names if (i := self._tokenizer.token_to_id(name)) in self.specials)

    def marker_ids(self, names: Collection[str]) -> dict[str, int]:
        """llguidance treats these as special, also added tokens like `<this>`."""
        added = self._tokenizer.get_added_tokens_decoder()
        found = {name: i for name in names if (i := self._tokenizer.token_to_id(name)) in added}
        return {name: i for name, i in found.items() if added[i].special or (name[0] == "<" and name[-1] == ">")}

    def ends_with(self, token_ids: Sequence[int], text: str) -> bool:
        tail: str = self._tokenizer.decode(list(token_ids[-TAIL_TOKENS:]), skip_special_tokens=False)
        return tail.rstrip().endswith(text)

    @cached_property
    def specials(self) -> frozenset[int]:
        return frozenset(i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special)

    def _encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        ending: Ending,
    ) -> list[int]:
        text = self.render(messages, tools, variables, ending)
        return self._encode(text, add_special_tokens=ending.add_special_tokens)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._encoder.encode(text, add_special_tokens=add_special_tokens)


def _with_arguments(message: Mapping[str, Any], form: Callable[[Any], Any]) -> Mapping[str, Any]:
    """Apply `form` to the arguments of the message's calls."""
    if "tool_calls" not in message:
        return message
    functions = [(call, call["function"]) for call in message["tool_calls"]]
    calls = [{**call, "function": {**called, "arguments": form(called["arguments"])}} for call, called in functions]
    return {**message, "tool_calls": calls}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _as_object(arguments: Any) -> Any:
    """The part of a text that is a JSON object, such as one that was cut off; else {}."""
    if not isinstance(arguments, str):
        return arguments
    try:
        read = from_json(arguments, allow_partial="trailing-strings", allow_inf_nan=False)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}
