"""Token deltas to text: what happens to each token between the mesh and the wire format."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from components.openai.fields import Usage
from components.openai.logprobs import ShownToken
from components.output.calls import CallDelta
from components.output.plan import OutputPlan
from components.text.stop import StopStrings
from components.text.token_bytes import TokenBytes
from components.text.tokenizer import TextModel
from components.wire.generate import StreamItem
from components.wire.logprobs import TokenLogprobs
from components.wire.tokens import unpack_tokens
from services.frontend.metrics import GapCounts
from services.frontend.ports import Branch, Mesh, Prompt


class Piece(NamedTuple):
    """New text of one choice; empty while a character or a possible stop string is incomplete."""

    choice: int  # its index
    text: str
    finish: str | None
    tokens: list[ShownToken] | None = None  # that came with it, when log-probabilities are asked for
    reasoning: str = ""  # new text of what the model thinks before it answers
    calls: Sequence[CallDelta] = ()  # of tools
    token_ids: Sequence[int] = ()  # that count, whatever of their text is shown

    @property
    def tells(self) -> bool:
        """Whether there is anything to see in it, beside an end."""
        return bool(self.text or self.tokens or self.reasoning or self.calls)


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """What the choices of one prompt are made from."""

    prompt: Prompt
    stops: Sequence[str] = ()
    echo: str = ""  # shown before the generated text, and not searched for stop strings
    continues: bool = False  # the generation continues the prompt's text, rather than answer it
    output: OutputPlan | None = None  # what its texts are to be taken apart into; None: they are shown as they are
    shows_special: bool = False  # special tokens are text
    shows_end: bool = False  # a stop string, or the text of a token that ends the answer, is part of it
    echo_alternatives: int | None = None  # with the prompt's tokens, which are told of before the first one


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


class Choice:
    """One generated text in the making."""

    __slots__ = (
        "_detokenizer",
        "_echo",
        "_ends",
        "_length",
        "_stops",
        "_text",
        "finish",
        "generated_tokens",
        "has_begun",
        "index",
        "prompt",
        "prompt_logprobs",
        "prompt_tokens",
        "shown_s",
    )

    def __init__(self, index: int, spec: PromptSpec, text: TextModel) -> None:
        self.index = index
        self.prompt = spec.prompt
        self.finish: str | None = None
        self.has_begun = False  # a token has arrived
        self.generated_tokens = 0
        self.shown_s = 0.0  # when its last piece was made, of a clock of ours; 0: none was
        self.prompt_tokens: list[ShownToken] = []  # to tell of before the first token, by then
        self.prompt_logprobs: Sequence[TokenLogprobs] | None = None  # of the prompt, from its second token on
        self._echo = spec.echo
        self._ends: frozenset[int] = frozenset()  # tokens whose text is not shown when the answer ends with them
        if not spec.shows_end:
            stop_ids = unpack_tokens(spec.prompt.sampling.stop_token_ids)
            self._ends = text.specials.union(stop_ids) if spec.shows_special else frozenset(stop_ids)
        self._text = text
        self._length = len(spec.echo)  # of the text so far, what a stop string may take away included
        shown = frozenset[int]() if spec.output is None else spec.output.shown
        self._detokenizer = text.detokenizer(
            spec.prompt.token_ids if spec.continues else (), shown, skip=not spec.shows_special
        )
        self._stops = StopStrings(spec.stops, included=spec.shows_end) if spec.stops else None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it, if one did."""
        return None if self._stops is None else self._stops.found

    async def begin(self) -> None:
        """To be called before the first delta is taken."""

    def take(self, item: StreamItem) -> Piece:
        """The text that `item` adds; sets `finish` when it is the last."""
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
        return Piece(self.index, text, self.finish, tokens, "", (), token_ids)

    def _one_by_one(
        self, stops: StopStrings, item: StreamItem, *, hides_last: bool
    ) -> tuple[str, list[ShownToken] | None]:
        """The text, and the tokens that count: none behind a stop string."""
        told, shown = item.logprobs, ""
        tokens: list[ShownToken] | None = None if told is None else []
        last = len(item.token_ids) - 1
        for i, token_id in enumerate(item.token_ids):
            self.generated_tokens += 1
            if told is not None and tokens is not None:
                tokens.append(shown_token(self._text.token_bytes, token_id, told[i], self._length))
            new = "" if hides_last and i == last else self._detokenizer.feed([token_id])
            self._length += len(new)
            text, matched = stops.feed(new)
            shown += text
            if matched:
                self.finish = "stop"
                return shown, tokens
        if item.finish is None:
            return shown, tokens
        text, matched = stops.feed(self._detokenizer.flush())
        if matched:
            self.finish = "stop"
        return shown + text + ("" if matched else stops.flush()), tokens


class TakenApart(Choice):
    """One whose text is reasoning, answer and calls of tools. Stop strings and log-probabilities are of the whole text."""

    __slots__ = ("_before", "_parser")

    def __init__(self, index: int, spec: PromptSpec, text: TextModel, plan: OutputPlan) -> None:
        super().__init__(index, spec, text)
        self._parser = plan.parser(tells_before=bool(spec.echo))
        self._before = plan.before
        self._echo = ""  # the parser tells of it

    async def begin(self) -> None:
        """Read what the answer goes on from."""
        await self._text.run(len(self._before), self._parser.begin)

    def take(self, item: StreamItem) -> Piece:
        """What `item` adds to each of them; sets `finish` when it is the last, or the only call that was wanted is there."""
        piece = super().take(item)
        parser = self._parser
        text, reasoning, calls = parser.feed(piece.text)
        if parser.done:
            self.finish = "tool_calls"
        elif self.finish is not None:
            more, thought, last = parser.flush()
            text, reasoning, calls = text + more, reasoning + thought, [*calls, *last]
            if parser.called and self.finish == "stop":
                self.finish = "tool_calls"
        return Piece(self.index, text, self.finish, piece.tokens, reasoning, calls, piece.token_ids)


class PromptChoices:
    """One prompt and its choices; the sink of their tokens (`services.frontend.ports.Sink`)."""

    def __init__(self, generation: "Generation", first: int, spec: PromptSpec, text: TextModel) -> None:
        self.prompt = spec.prompt
        indices, plan = range(first, first + spec.prompt.sampling.n), spec.output
        self.choices = [Choice(i, spec, text) if plan is None else TakenApart(i, spec, text, plan) for i in indices]
        self._generation = generation
        self._text = text
        self._echo_alternatives = spec.echo_alternatives
        self._awaits_prompt = spec.prompt.sampling.prompt_logprobs is not None
        self._held: list[tuple[Choice, StreamItem]] = []  # until the prompt's log-probabilities are here
        self._branches: Sequence[Branch] = ()

    async def start(self, mesh: Mesh) -> None:
        """Have the choices generated. Raises: MeshError."""
        for choice in self.choices:
            await choice.begin()
        self._branches = await mesh.generate(self.prompt, self)

    def close(self) -> None:
        for branch in self._branches:
            branch.close()

    def take(self, branch: int, item: StreamItem) -> bool:
        choice = self.choices[branch]
        if not choice.has_begun:
            choice.has_begun = True
            self._generation.begun(choice, item, is_first=branch == 0)
        if not self._awaits_prompt:
            return self._generation.take(choice, item)
        self._held.append((choice, item))
        if item.prompt_logprobs is not None:
            self._generation.wake()
        return True

    def fail(self, error: Exception) -> None:
        self._generation.fail(error)

    async def show_prompt(self) -> None:
        """Once the prompt's log-probabilities are here, put its tokens before each choice, then take what was held."""
        told = next((item.prompt_logprobs for _, item in self._held if item.prompt_logprobs is not None), None)
        if told is None:
            return
        tokens: list[ShownToken] = []
        if (count := self._echo_alternatives) is not None:
            shown = partial(shown_prompt, self._text, self.prompt.token_ids, told, count)
            tokens = await self._text.run(len(self.prompt.token_ids) * (1 + count), shown)
        for choice in self.choices:
            choice.prompt_logprobs, choice.prompt_tokens = told, tokens
        held, self._held, self._awaits_prompt = self._held, [], False
        for choice, item in held:
            self._generation.take(choice, item)


Show = Callable[[Piece, bool], bool]  # (piece, is the last of all) → False: the request's task must wake


class Generation:
    """All choices of one request, generated side by side.

    Tokens are pushed here as they arrive, and their pieces shown at once. The request's task sleeps in `woken` meanwhile.
    """

    def __init__(
        self,
        mesh: Mesh,
        text: TextModel,
        specs: Sequence[PromptSpec],
        gaps: GapCounts,
        began: Callable[[int], None],
    ) -> None:
        """`began` is called at each choice's first token, with the length of its prompt if it is the prompt's first choice."""
        self._prompts: list[PromptChoices] = []
        self.choices: list[Choice] = []  # prompt by prompt
        for spec in specs:
            prompt = PromptChoices(self, len(self.choices), spec, text)
            self._prompts.append(prompt)
            self.choices += prompt.choices
        self.first_unix_ns = 0  # when the first token arrived
        self.text = text
        self.num_generated = 0  # tokens so far, over all choices
        self._num_prompt = sum(len(prompt.prompt.token_ids) for prompt in self._prompts)
        self._num_cached = 0  # of them
        self._num_unfinished = len(self.choices)
        self._mesh = mesh
        self._gaps = gaps
        self._began = began
        self._show: Show | None = None
        self._error: Exception | None = None
        self._wake = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Every choice has its last piece."""
        return self._num_unfinished == 0

    def usage(self) -> Usage:
        """Tokens so far, over all choices; a prompt counts once, whatever the number of its choices."""
        return Usage.of(self._num_prompt, self.num_generated, self._num_cached)

    @asynccontextmanager
    async def running(self, show: Show) -> AsyncIterator[None]:
        """Have all choices generated while inside; leaving cancels those that still run.

        `show` gets each piece as it is made, from the event loop. Raises: MeshError.
        """
        self._show = show
        try:
            await self._start()
            yield
        finally:
            self._close()

    async def woken(self) -> None:
        """Sleep until the first piece, one that `show` could not send, or the last. Raises: what ended the generation."""
        await self._wake.wait()
        self._wake.clear()
        if self._error is not None:
            raise self._error
        for prompt in self._prompts:
            await prompt.show_prompt()

    def wake(self) -> None:
        """Let the request's task run."""
        self._wake.set()

    def begun(self, choice: Choice, item: StreamItem, *, is_first: bool) -> None:
        """Note the first token of a choice; `is_first`: of its prompt's first choice."""
        self.first_unix_ns = self.first_unix_ns or time.time_ns()
        if is_first:
            self._num_cached += item.num_cached_tokens
        self._began(len(choice.prompt.token_ids) if is_first else 0)

    def take(self, choice: Choice, item: StreamItem) -> bool:
        """Make and show a piece. Returns False if the choice wants no more tokens."""
        if choice.finish is not None or self._error is not None:  # more tokens were on their way
            return False
        piece = self._piece(choice, item)
        is_last = False
        if piece.finish is not None:
            self._num_unfinished -= 1
            is_last = self.is_over
        assert self._show is not None
        if not self._show(piece, is_last) or is_last:
            self._wake.set()
        return piece.finish is None

    def fail(self, error: Exception) -> None:
        """End the generation: nothing more is shown."""
        if self._error is None and not self.is_over:
            self._error = error
            self._close()
            self._wake.set()

    async def _start(self) -> None:
        if len(self._prompts) == 1:
            await self._prompts[0].start(self._mesh)
            return
        try:
            async with asyncio.TaskGroup() as starting:
                for prompt in self._prompts:
                    starting.create_task(prompt.start(self._mesh))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    def _close(self) -> None:
        for prompt in self._prompts:
            prompt.close()

    def _piece(self, choice: Choice, item: StreamItem) -> Piece:
        """What `item` adds, counted."""
        now = time.perf_counter()
        if choice.shown_s:
            self._gaps.observe(now - choice.shown_s)
        choice.shown_s = now
        piece = choice.take(item)
        self.num_generated += len(piece.token_ids)
        return piece
