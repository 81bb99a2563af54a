"""One choice of an answer: turns its tokens into pieces of text."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Self

from components.openai.logprobs import ShownToken
from components.output.calls import CallDelta
from components.output.plan import OutputPlan
from components.text.detokenizer import StopStrings, TokenBytes
from components.text.tokenizer import TextModel
from components.wire.generate import StreamItem
from components.wire.logprobs import TokenLogprobs
from components.wire.step_stats import NO_DRAFTS, DraftCounts
from services.frontend.ports import Prompt


class TextDelta(NamedTuple):
    """New text of one choice; empty while a character or a possible stop string is incomplete."""

    choice: int  # its index
    text: str
    finish: str | None
    tokens: list[ShownToken] | None = None  # with log-probabilities, if these are requested
    reasoning: str = ""  # new text
    calls: Sequence[CallDelta] = ()
    token_ids: Sequence[int] = ()  # all tokens that count, including those without visible text

    @property
    def shows(self) -> bool:
        return bool(self.text or self.tokens or self.reasoning or self.calls)

    @classmethod
    def joined(cls, pieces: "Sequence[TextDelta]", *, has_logprobs: bool) -> Self:
        return cls(
            pieces[-1].choice,
            "".join([piece.text for piece in pieces]),
            pieces[-1].finish,
            [token for piece in pieces for token in piece.tokens or ()] if has_logprobs else None,
            "".join([piece.reasoning for piece in pieces]),
            [call for piece in pieces for call in piece.calls],
            [token_id for piece in pieces for token_id in piece.token_ids],
        )


def shown_token(names: TokenBytes, token_id: int, logprobs: TokenLogprobs, offset: int) -> ShownToken:
    """Return a token as the client sees it. `offset`: index of its first character in the text."""
    top = [(names.of(other), logprob) for other, logprob in logprobs.top]
    return ShownToken(names.of(token_id), logprobs.logprob, top, offset)


def shown_prompt(
    text: TextModel, prompt: Prompt, logprobs: Sequence[TokenLogprobs], alternatives: int
) -> list[ShownToken]:
    """Return a prompt's tokens as the client sees them. The first one has no log-probability, as no token precedes it.

    The echo includes a special token if the client wrote it or asked to see it. One that the tokenizer added has no text.
    """
    names, detokenizer, offset = text.token_bytes, text.detokenizer(skip=False), 0
    shown = []
    for i, token_id in enumerate(prompt.token_ids):
        if i:
            of = logprobs[i - 1]
            shown.append(shown_token(names, token_id, replace(of, top=of.top[:alternatives]), offset))
        else:
            shown.append(ShownToken(names.of(token_id), None, [], offset))
        if token_id not in text.specials or prompt.echo.startswith(text.decode([token_id], skip=False), offset):
            offset += len(detokenizer.feed([token_id]))
    return shown


class Choice:
    __slots__ = (
        "_detokenizer",
        "_echo",
        "_ends",
        "_length",
        "_min_tokens",
        "_stops",
        "_text",
        "draft_counts",
        "finish",
        "generated_tokens",
        "has_begun",
        "index",
        "prompt",
        "prompt_logprobs",
        "prompt_tokens",
        "shown_s",
    )

    def __init__(self, index: int, prompt: Prompt, text: TextModel) -> None:
        self.index = index
        self.prompt = prompt
        self.finish: str | None = None
        self.has_begun = False  # a token has arrived
        self.generated_tokens = 0
        self.draft_counts = NO_DRAFTS
        self.shown_s = 0.0  # perf_counter() of the last piece; 0 before the first
        self.prompt_tokens: list[ShownToken] = []  # shown before the first token
        self.prompt_logprobs: Sequence[TokenLogprobs] | None = None  # of the prompt's tokens, from the second one on
        self._echo = prompt.echo
        shown = frozenset[int]() if prompt.output is None else prompt.output.shown
        self._ends: frozenset[int] = frozenset()  # tokens that are not shown if the answer ends with them
        if not prompt.shows_end:
            own = frozenset[int]() if prompt.sampling.ignore_eos else text.ends - shown
            self._ends = own.union(prompt.sampling.stop_token_ids, text.specials if prompt.shows_special else ())
        self._text = text
        self._length = len(prompt.echo)  # characters so far, including those that a stop string may still remove
        self._detokenizer = text.detokenizer(
            prompt.token_ids if prompt.continues else (), shown, skip=not prompt.shows_special
        )
        self._stops = StopStrings(prompt.stops, included=prompt.shows_end) if prompt.stops else None
        self._min_tokens = prompt.sampling.min_tokens

    @property
    def reasoning_tokens(self) -> int:
        return 0

    @property
    def counted_drafts(self) -> DraftCounts:
        """Draft counts of the choice. Drafts after the end of the answer do not count as accepted."""
        checked, accepted = self.draft_counts
        return DraftCounts(checked, min(accepted, self.generated_tokens))

    @property
    def stop_string(self) -> str | None:
        return None if self._stops is None else self._stops.found

    async def begin(self) -> None:
        """Call before the first `add_tokens`."""

    def add_tokens(self, item: StreamItem) -> TextDelta:
        """Return the text that `item` adds. Sets `finish` with the last piece."""
        if not self.prompt.generates:
            item = item._replace(
                token_ids=[], logprobs=None if item.logprobs is None else [], finish=item.finish and "length"
            )
        if item.draft_counts is not None:
            self.draft_counts = item.draft_counts
        self.finish = item.finish
        before = self.generated_tokens
        tokens: list[ShownToken] | None = None
        hides_last = item.finish == "stop" and not self._ends.isdisjoint(item.token_ids[-1:])
        if self._stops is None and item.logprobs is None:
            self.generated_tokens += len(item.token_ids)
            text = self._detokenizer.feed(item.token_ids[:-1] if hides_last else item.token_ids)
            if item.finish is not None:
                text += self._detokenizer.flush()
        else:
            text, tokens = self._one_by_one(self._stops or StopStrings(()), item, hides_last=hides_last)
        if self._echo:
            text, self._echo = self._echo + text, ""
        if self.prompt_tokens and tokens is not None:
            tokens, self.prompt_tokens = self.prompt_tokens + tokens, []
        counted = self.generated_tokens - before
        token_ids = item.token_ids if counted == len(item.token_ids) else item.token_ids[:counted]
        return TextDelta(self.index, text, self.finish, tokens, "", (), token_ids)

    def _one_by_one(
        self, stops: StopStrings, item: StreamItem, *, hides_last: bool
    ) -> tuple[str, list[ShownToken] | None]:
        """Return the text, and the tokens that count: those up to a stop string."""
        logprobs, shown = item.logprobs, ""
        tokens: list[ShownToken] | None = None if logprobs is None else []
        last = len(item.token_ids) - 1
        for i, token_id in enumerate(item.token_ids):
            self.generated_tokens += 1
            if logprobs is not None and tokens is not None:
                tokens.append(shown_token(self._text.token_bytes, token_id, logprobs[i], self._length))
            new = "" if hides_last and i == last else self._detokenizer.feed([token_id])
            self._length += len(new)
            text, matched = stops.feed(new, counts=self.generated_tokens > self._min_tokens)
            shown += text
            if matched:
                self.finish = "stop"
                return shown, tokens
        if item.finish is None:
            return shown, tokens
        text, matched = stops.feed(self._detokenizer.flush(), counts=self.generated_tokens > self._min_tokens)
        if matched:
            self.finish = "stop"
        return shown + text + ("" if matched else stops.flush()), tokens


class ParsedChoice(Choice):
    """Parses the text into reasoning, answer and tool calls. Stop strings apply to the unparsed text."""

    __slots__ = ("_before", "_parser", "_thought")

    def __init__(self, index: int, prompt: Prompt, text: TextModel, plan: OutputPlan) -> None:
        super().__init__(index, prompt, text)
        self._parser = plan.parser(reports_before=bool(prompt.echo))
        self._before = plan.before
        self._echo = ""  # the parser returns it
        self._thought = None if plan.reasoning is None else UpToMarker(plan.reasoning.over, text)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning and its markers."""
        return self._thought.num_tokens if self._thought is not None and self._parser.has_thought else 0

    async def begin(self) -> None:
        await self._text.run(len(self._before), self._parser.begin)

    def add_tokens(self, item: StreamItem) -> TextDelta:
        """As in `Choice`. Also sets `finish` when the only allowed call is complete."""
        piece = super().add_tokens(item)
        parser = self._parser
        if self._thought is not None and not parser.answers:
            self._thought.count(piece.token_ids)
        text, reasoning, calls = parser.feed(piece.text)
        if parser.done:
            self.finish = "tool_calls"
        elif self.finish is not None:
            more, thought, last = parser.flush()
            text, reasoning, calls = text + more, reasoning + thought, [*calls, *last]
            if parser.called and self.finish == "stop":
                self.finish = "tool_calls"
        return TextDelta(self.index, text, self.finish, piece.tokens, reasoning, calls, piece.token_ids)


class UpToMarker:
    """Counts tokens up to the first marker, which may span several tokens or begin within one."""

    __slots__ = ("_end", "_found", "_longest", "_markers", "_text", "num_tokens")

    def __init__(self, markers: Sequence[str], text: TextModel) -> None:
        self.num_tokens = 0
        self._markers = [marker.encode() for marker in markers]
        self._longest = max(map(len, self._markers))
        self._text = text
        self._end = b""  # of the text so far
        self._found = False

    def count(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._found:
                return
            self.num_tokens += 1
            text = self._end + self._text.token_bytes.of(token_id)
            self._found = any(marker in text for marker in self._markers)
            self._end = text[1 - self._longest :]
