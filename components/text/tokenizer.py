"""The text side of a model: chat template and tokenizer, loaded from its directory. Needs no torch."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from components.errors import Rejected
from components.text.detokenizer import Detokenizer
from components.text.long_prompts import LongPrompts
from components.text.token_bytes import TokenBytes

INLINE_CHARS: Final = 4096  # about 0.7 ms of tokenising; a hop to a thread and back costs about 0.1 ms
CONTEXT_TOKENS: Final = 6  # of the prompt, enough for a decoder to see what its continuation follows


class TextModel:
    """Messages or text to token ids and back. Reads only, so one serves every request and thread."""

    def __init__(
        self, tokenizer: Tokenizer, chat_template: str | None, special_tokens: Mapping[str, str] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()  # a tokenizer.json may bring either: we count tokens ourselves
        self._tokenizer.no_padding()
        self._chat_template = chat_template
        self._special_tokens = dict(special_tokens or {})  # templates name them: bos_token, eos_token
        self._long_prompts = LongPrompts()
        self.vocab_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read `tokenizer.json`, its configuration and the chat template, if there is one.

        Raises: FileNotFoundError, when the directory has no tokenizer.
        """
        if not (directory / "tokenizer.json").is_file():
            raise FileNotFoundError(f"{directory} has no tokenizer.json: not the directory of a model that speaks text")
        loaded = PreTrainedTokenizerFast.from_pretrained(directory)
        template = loaded.chat_template
        if isinstance(template, dict):  # several by name; the others are for tools and retrieval
            template = template.get("default")
        return cls(loaded.backend_tokenizer, template, loaded.special_tokens_map)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """What each token stands for."""
        return TokenBytes(self._tokenizer)

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can work at all."""
        return self._chat_template is not None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text of a conversation, open for the assistant's next turn.

        Raises: Rejected, with the template's own reason, when it does not take these messages.
        """
        if self._chat_template is None:
            raise Rejected(
                "This model has no chat template, so it cannot hold a conversation; use /v1/completions.", param="model"
            )
        try:
            rendered, _ = render_jinja_template(
                [list(messages)], chat_template=self._chat_template, add_generation_prompt=True, **self._special_tokens
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as exc:
            # a template is foreign code, and a message it does not expect breaks it in any of these ways
            raise Rejected(f"The model's chat template refuses these messages: {exc}", param="messages") from exc
        text: str = rendered[0]
        return text

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation; a long one is rendered and tokenised off the event loop. Raises: Rejected."""
        chars = sum(len(str(m.get("content", ""))) for m in messages)
        if chars <= INLINE_CHARS:
            return self._encode_chat(messages)
        return await self._long_prompts.run(chars, lambda: self._encode_chat(messages))

    async def encode_text(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the model wants around it."""
        if len(text) <= INLINE_CHARS:
            return self._encode(text, add_special_tokens=True)
        return await self._long_prompts.run(len(text), lambda: self._encode(text, add_special_tokens=True))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens skipped."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def detokenizer(self, prompt: Sequence[int] = ()) -> Detokenizer:
        """A fresh incremental detokenizer; give it the prompt whose text the generation continues."""
        return Detokenizer(self._tokenizer, prompt[-CONTEXT_TOKENS:])

    def _encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self._encode(self.render(messages), add_special_tokens=False)  # the template writes them itself

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # the batch call alone lets go of the GIL, and leaves out the character offsets
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
