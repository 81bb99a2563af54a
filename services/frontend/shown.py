"""Tokens as an answer shows them: their bytes, their log-probabilities, and where in the text each begins."""

from collections.abc import Sequence
from dataclasses import replace

from components.openai.logprobs import ShownToken
from components.text.token_bytes import TokenBytes
from components.text.tokenizer import TextModel
from components.wire.logprobs import TokenLogprobs


def shown_token(names: TokenBytes, token_id: int, told: TokenLogprobs, offset: int) -> ShownToken:
    """A token that begins at character `offset` of the text."""
    top = [(names.of(other), logprob) for other, logprob in told.top]
    return ShownToken(names.of(token_id), told.logprob, top, offset)


def shown_prompt(
    text: TextModel, token_ids: Sequence[int], told: Sequence[TokenLogprobs], alternatives: int
) -> list[ShownToken]:
    """A prompt's tokens with so many alternatives; nothing comes before the first one that could make it probable."""
    names, detokenizer, offset = text.token_bytes, text.detokenizer(), 0
    shown = []
    for i, token_id in enumerate(token_ids):
        if i:
            of = told[i - 1]
            shown.append(shown_token(names, token_id, replace(of, top=of.top[:alternatives]), offset))
        else:
            shown.append(ShownToken(names.of(token_id), None, [], offset))
        offset += len(detokenizer.feed([token_id]))
    return shown
