"""Log-probabilities in an answer: a chat's list of tokens, and completions' parallel lists.

Each token that `usage` counts has an entry, as in vLLM, also in a stop string.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Self

from pydantic import BaseModel, TypeAdapter

from components.openai.parts import Items, items_of
from components.wire.logprobs import TokenLogprobs

LEAST: Final = -9999.0  # OpenAI's "very improbable"; JSON has no infinity
TOKENS_AT_ONCE: Final = 32  # with 20 alternatives each, 2 ms


class ShownToken(NamedTuple):
    token: bytes  # may be part of a character
    logprob: float | None  # None for a prompt's first token
    top: list[tuple[bytes, float]]  # most probable first
    offset: int  # in characters of the choice's text


class TopLogprob(BaseModel):
    """An alternative token; its `bytes` may be part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a choice, or of one chunk."""

    content: list[TokenLogprob]
    refusal: None = None

    @classmethod
    def of(cls, tokens: Sequence[ShownToken]) -> Self:
        return cls(content=[_token(token) for token in tokens])

    @staticmethod
    def parts(tokens: Sequence[ShownToken]) -> dict[str, Items]:
        """The list items of `of(tokens)`, for `filled`."""
        return {"content": (_token(token).model_dump_json().encode() for token in tokens)}


def _token(shown: ShownToken) -> TokenLogprob:
    top = [TopLogprob(token=_text(t), logprob=max(logprob, LEAST), bytes=list(t)) for t, logprob in shown.top]
    logprob = LEAST if shown.logprob is None else max(shown.logprob, LEAST)
    return TokenLogprob(token=_text(shown.token), logprob=logprob, bytes=list(shown.token), top_logprobs=top)


class CompletionLogprobs(BaseModel):
    """Lists with one entry per token of a choice, or of one chunk.

    `top_logprobs` includes the token itself, even if it is improbable.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]

    @classmethod
    def of(cls, tokens: Sequence[ShownToken]) -> Self:
        return cls(**{name: [column(token) for token in tokens] for name, column in _COLUMNS.items()})

    @staticmethod
    def parts(tokens: Sequence[ShownToken]) -> dict[str, Items]:
        """The list items of `of(tokens)`, for `filled`."""

        def filling(column: Callable[[ShownToken], Any]) -> Items:
            return items_of(tokens, lambda some: [column(token) for token in some], TOKENS_AT_ONCE)

        return {name: filling(column) for name, column in _COLUMNS.items()}


class PromptLogprob(BaseModel):
    """A token at a position of the prompt, as in vLLM."""

    logprob: float
    rank: int | None  # in the vocabulary, from 1; None: beyond the requested alternatives
    decoded_token: str


# per token, by token id, the token itself first; None for the first token
PromptLogprobs = list[dict[str, PromptLogprob] | None]


def prompt_parts(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], alternatives: int, name: Callable[[int], bytes]
) -> Items:
    """Items of a prompt's `PromptLogprobs`; `logprobs` starts with the second token."""
    yield b"null"
    for i, of in enumerate(logprobs, 1):
        yield _places.dump_json(_place(token_ids[i], of, alternatives, name))


def _place(
    token_id: int, logprobs: TokenLogprobs, alternatives: int, name: Callable[[int], bytes]
) -> dict[str, PromptLogprob]:
    ranks = {other: rank for rank, (other, _) in enumerate(logprobs.top, start=1)}
    found = {token_id: logprobs.logprob, **dict(logprobs.top[:alternatives])}
    return {
        str(i): PromptLogprob(logprob=max(logprob, LEAST), rank=ranks.get(i), decoded_token=_text(name(i)))
        for i, logprob in found.items()
    }


_places: Final = TypeAdapter(dict[str, PromptLogprob])


def _top(shown: ShownToken) -> dict[str, float] | None:
    if shown.logprob is None:
        return None
    found: dict[str, float] = {}
    for token, logprob in [*shown.top, (shown.token, shown.logprob)]:
        found.setdefault(_text(token, "bytes:"), max(logprob, LEAST))
    return found


_COLUMNS: Final[dict[str, Callable[[ShownToken], Any]]] = {  # in the order of CompletionLogprobs
    "text_offset": lambda shown: shown.offset,
    "token_logprobs": lambda shown: None if shown.logprob is None else max(shown.logprob, LEAST),
    "tokens": lambda shown: _text(shown.token, "bytes:"),
    "top_logprobs": _top,
}


def _text(token: bytes, prefix: str = "") -> str:
    r"""A token's text; `\xf0\x9f` after `prefix` for part of a character, as in OpenAI's API."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in token)
