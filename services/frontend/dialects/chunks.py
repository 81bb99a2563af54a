"""The server-sent events of chats and completions."""

import json
from collections.abc import Callable, Sequence

from pydantic import BaseModel

from components.openai.errors import ApiError
from components.openai.events import DONE, NOTHING, Events, More, member
from components.openai.fields import GenerationFields
from components.openai.logprobs import ShownToken
from services.frontend.generation import Generation, Piece


class ChunkStream:
    """A stream of chunks, as chats and completions have it."""

    __slots__ = ("_events", "_generation", "_logprobs", "_opened", "_tells_usage")

    def __init__(
        self,
        events: Events,
        logprobs: Callable[[Sequence[ShownToken] | None], BaseModel | None],
        generation: Generation,
        *,
        tells_usage: bool,
    ) -> None:
        self._events = events
        self._logprobs = logprobs
        self._generation = generation
        self._tells_usage = tells_usage
        self._opened: set[int] = set()

    def piece(self, piece: Piece) -> bytes:
        """A chunk for the text, and one for the end of its choice; before its first one, the opening."""
        index = piece.choice
        data = self._text(piece) if piece.tells else b""
        if index not in self._opened:
            self._opened.add(index)
            data = self._events.open(index) + data
        return data if piece.finish is None else data + self._events.finish(index, piece.finish)

    async def end(self) -> bytes:
        """The usage, when it is asked for, and OpenAI's end mark."""
        if self._tells_usage:
            return self._events.usage(self._generation.usage()) + DONE
        return DONE

    def fail(self, error: ApiError) -> bytes:
        """The error as an event, and the end mark."""
        return b"data: " + error.body() + b"\n\n" + DONE

    def _text(self, piece: Piece, more: More = NOTHING) -> bytes:
        """What is new in it."""
        index, text, logprobs = piece.choice, piece.text, self._logprobs(piece.tokens)
        if piece.reasoning or piece.calls:
            return self._events.parts(index, text, piece.reasoning, piece.calls, logprobs=logprobs, more=more)
        return self._events.text(index, text, logprobs, more)


class TellingStream(ChunkStream):
    """One whose chunks tell more, as vLLM has it: token ids, and the usage so far in each."""

    __slots__ = ("_tells_ids", "_tells_usage_so_far")

    def __init__(
        self,
        events: Events,
        logprobs: Callable[[Sequence[ShownToken] | None], BaseModel | None],
        generation: Generation,
        request: GenerationFields,
    ) -> None:
        super().__init__(events, logprobs, generation, tells_usage=request.include_usage)
        self._tells_ids = bool(request.return_token_ids)
        self._tells_usage_so_far = request.continuous_usage

    def piece(self, piece: Piece) -> bytes:
        """A chunk wherever there are new tokens, though they may have no text yet."""
        index, data = piece.choice, b""
        usage = member("usage", self._generation.usage().model_dump_json()) if self._tells_usage_so_far else b""
        first = index not in self._opened
        if first:
            self._opened.add(index)
            data = self._events.open(index, More(usage=usage))
        if piece.tells or piece.token_ids:
            # a chat has one prompt, and tells it once
            once = self._tells_ids and first and self._events.opening is not None and index == 0
            prompt_ids = self._prompt_ids(index) if once else b""
            data += self._text(piece, More(self._ids(piece, first=first), prompt_ids, usage))
        return data if piece.finish is None else data + self._events.finish(index, piece.finish, More(usage=usage))

    def _ids(self, piece: Piece, *, first: bool) -> bytes:
        """Of a choice; a completion's first chunk tells its prompt's too."""
        if not self._tells_ids:
            return b""
        own = member("token_ids", json.dumps(list(piece.token_ids)))
        return self._prompt_ids(piece.choice) + own if first and self._events.opening is None else own

    def _prompt_ids(self, index: int) -> bytes:
        return member("prompt_token_ids", json.dumps(self._generation.choices[index].prompt.token_ids))


def chunks(
    request: GenerationFields,
    events: Events,
    logprobs: Callable[[Sequence[ShownToken] | None], BaseModel | None],
    generation: Generation,
) -> ChunkStream:
    """The stream that a request asks for, decided once: most tell nothing more."""
    if request.return_token_ids or request.continuous_usage:
        return TellingStream(events, logprobs, generation, request)
    return ChunkStream(events, logprobs, generation, tells_usage=request.include_usage)
