"""The choices of one request: receives tokens, and passes pieces of text to the client."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial, reduce
from typing import Final

from components.errors import Cancelled
from components.openai.fields import Usage
from components.openai.logprobs import ShownToken
from components.text.tokenizer import TextModel
from components.wire.generate import StreamItem
from components.wire.logprobs import TokenLogprobs
from components.wire.step_stats import DraftCounts
from services.frontend.choice import Choice, ParsedChoice, TextDelta, shown_prompt
from services.frontend.metrics import GapCounts
from services.frontend.ports import Branch, Mesh, Prompt

AT_ONCE_TOKENS: Final = 1 << 16  # prompt tokens, over all choices that begin in one turn of the event loop
MAX_HELD_ITEMS: Final = 100_000  # over all choices of a request, while the client reads earlier ones

Show = Callable[[TextDelta, bool], bool]  # (piece, is it the last of all) → False: wake the request's task


class PromptChoices:
    """One prompt and its choices; the `Sink` of its branches."""

    def __init__(self, generation: "Generation", first: int, prompt: Prompt, text: TextModel) -> None:
        self.prompt = prompt
        indices, plan = range(first, first + prompt.sampling.n), prompt.output
        self.choices = [
            Choice(i, prompt, text) if plan is None else ParsedChoice(i, prompt, text, plan) for i in indices
        ]
        self._generation = generation
        self._text = text
        self._awaits_prompt = prompt.sampling.prompt_logprobs is not None
        self._prompt_logprobs: Sequence[TokenLogprobs] | None = None
        # by branch, until its choice is shown; the first items of a choice may be shown with its whole prompt
        self._held: dict[int, list[StreamItem]] = {}
        self._branches: Sequence[Branch] = ()

    async def start(self, mesh: Mesh) -> None:
        for choice in self.choices:
            await choice.begin()
        self._branches = await mesh.generate(self.prompt, self)

    def close(self) -> None:
        for branch in self._branches:
            branch.close()

    def add_tokens(self, branch: int, item: StreamItem) -> bool:
        choice = self.choices[branch]
        if not choice.has_begun:
            choice.has_begun = True
            self._generation.begun(choice, item, is_first=branch == 0)
            if self.prompt.sampling.prompt_logprobs is not None or self._generation.in_turns:
                self._held[branch] = []
        if branch not in self._held:
            return self._generation.add_tokens(choice, item)
        self._held[branch].append(item)
        self._generation.held(1)
        if item.prompt_logprobs is not None:
            self._prompt_logprobs = item.prompt_logprobs
        if self.is_ready:
            self._generation.wake()
        return True

    def fail(self, error: Exception) -> None:
        self._generation.fail(error)

    @property
    def is_ready(self) -> bool:
        """Return whether a held choice can be shown."""
        return bool(self._held) and (not self._awaits_prompt or self._prompt_logprobs is not None)

    async def show_one(self) -> None:
        """Show the held items of one choice. Call only if `is_ready`."""
        if self._awaits_prompt and self._prompt_logprobs is not None:
            await self._show_prompt(self._prompt_logprobs)
        branch = next(iter(self._held))
        items = self._held.pop(branch)
        self._generation.held(-len(items))
        for item in items:
            self._generation.add_tokens(self.choices[branch], item)

    async def _show_prompt(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Add the prompt's tokens to each choice, before its first token."""
        tokens: list[ShownToken] = []
        if (count := self.prompt.echo_alternatives) is not None:
            shown = partial(shown_prompt, self._text, self.prompt, logprobs, count)
            tokens = await self._text.run(len(self.prompt.token_ids) * (1 + count), shown)
        for choice in self.choices:
            choice.prompt_logprobs, choice.prompt_tokens = logprobs, tokens
        self._awaits_prompt = False


class Generation:
    """All choices of one request. Tokens are shown as soon as they arrive, while the request's task sleeps in `woken`."""

    def __init__(
        self,
        mesh: Mesh,
        text: TextModel,
        prompts: Sequence[Prompt],
        gaps: GapCounts,
        began: Callable[[int, int], None],
    ) -> None:
        """`began` is called at the first token of each choice, with the numbers of its prompt's tokens and of cached ones.

        Both are 0 for all but the first choice of a prompt.
        """
        self._prompts: list[PromptChoices] = []
        self.choices: list[Choice] = []  # prompt by prompt
        for prompt in prompts:
            of_prompt = PromptChoices(self, len(self.choices), prompt, text)
            self._prompts.append(of_prompt)
            self.choices += of_prompt.choices
        self.first_unix_ns = 0  # when the first token arrived
        self.text = text
        self.num_generated = 0  # tokens so far, over all choices
        self._num_prompt = sum(len(prompt.token_ids) for prompt in prompts)
        self._num_cached = 0  # prompt tokens found in a prefix cache
        self._num_unfinished = len(self.choices)
        self._num_held = 0  # items, over all choices
        prompt_tokens = sum(len(choice.prompt.token_ids) for choice in self.choices)
        self.in_turns = len(self.choices) > 1 and prompt_tokens > AT_ONCE_TOKENS  # each choice may repeat its prompt
        self._mesh = mesh
        self._gaps = gaps
        self._began = began
        self._show: Show | None = None
        self._error: Exception | None = None
        self._wake = asyncio.Event()
        self._longest_gap_s = 0.0

    @property
    def is_over(self) -> bool:
        return self._num_unfinished == 0

    def usage(self) -> Usage:
        """Return the usage so far. A prompt counts once, whatever the number of its choices."""
        reasoning = sum(choice.reasoning_tokens for choice in self.choices)
        drafts = None
        if any(choice.prompt.prediction for choice in self.choices):
            drafts = reduce(DraftCounts.plus, (choice.counted_drafts for choice in self.choices))
        return Usage.of(self._num_prompt, self.num_generated, self._num_cached, reasoning, drafts)

    def longest_gap_s(self) -> float:
        """Return the longest time without a piece in any choice, up to now for those that have not ended."""
        now_s = time.perf_counter()
        open_s = (now_s - choice.shown_s for choice in self.choices if choice.shown_s and choice.finish is None)
        return max(self._longest_gap_s, *open_s, 0.0)

    @asynccontextmanager
    async def running(self, show: Show) -> AsyncIterator[None]:
        """Generate all choices within the context; leaving it cancels those that have not ended. Raises: MeshError."""
        self._show = show
        try:
            await self._start()
            yield
        finally:
            self._close()

    async def woken(self) -> None:
        """Wait for a piece that `show` could not send, the last piece, a choice that was held, or an error.

        Shows one held choice per call, so that the caller can send each before the next is built. Raises: that error.
        """
        await self._wake.wait()
        self._wake.clear()
        if self._error is not None:
            raise self._error
        ready = next((prompt for prompt in self._prompts if prompt.is_ready), None)
        if ready is not None:
            await asyncio.sleep(0)  # let other requests run between two choices
            await ready.show_one()
            if any(prompt.is_ready for prompt in self._prompts):
                self._wake.set()

    def held(self, change: int) -> None:
        """Count held items. Raises: Cancelled, if too many arrive while the client reads earlier choices."""
        self._num_held += change
        if self._num_held > MAX_HELD_ITEMS:
            raise Cancelled("the client reads too slowly")

    def wake(self) -> None:
        self._wake.set()

    def begun(self, choice: Choice, item: StreamItem, *, is_first: bool) -> None:
        self.first_unix_ns = self.first_unix_ns or time.time_ns()
        if is_first:
            self._num_cached += item.num_cached_tokens
            self._began(len(choice.prompt.token_ids), item.num_cached_tokens)
        else:
            self._began(0, 0)

    def add_tokens(self, choice: Choice, item: StreamItem) -> bool:
        """Build a piece and show it. Returns False if the choice needs no more tokens."""
        if choice.finish is not None or self._error is not None:  # these tokens were already on their way
            return False
        piece = self._piece(choice, item)
        is_last = piece.finish is not None and self._num_unfinished == 1
        assert self._show is not None
        if not self._show(piece, is_last) or is_last:
            self._wake.set()
        if piece.finish is None:
            return True
        self._num_unfinished -= 1  # only now: a `show` that raises must end the generation even at the last piece
        return False

    def fail(self, error: Exception) -> None:
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

    def _piece(self, choice: Choice, item: StreamItem) -> TextDelta:
        now = time.perf_counter()
        if choice.shown_s:
            self._gaps.observe(gap_s := now - choice.shown_s)
            self._longest_gap_s = max(self._longest_gap_s, gap_s)
        choice.shown_s = now
        piece = choice.add_tokens(item)
        self.num_generated += len(piece.token_ids)
        self._gaps.num_tokens += len(piece.token_ids)
        return piece
