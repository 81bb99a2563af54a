"""A request in the scheduler, and the part of it that one step computes."""

from dataclasses import dataclass, field, replace
from enum import StrEnum, auto
from typing import Any, Final

import msgspec

from components.lifecycle import Lifecycle
from components.wire.sampling import SamplingParams, branch_seed
from engine.ports import Phase, TokenMask
from engine.sampling.row import Row


class RequestState(StrEnum):
    WAITING = auto()  # queued without pages
    RESERVED = auto()  # DECODE: another process writes KV into its pages
    RUNNING = auto()
    HELD = auto()  # ended, but a transfer may touch its pages
    FINISHED = auto()  # ended; pages are kept until the step in flight lands


S = RequestState
NEXT: Final = {
    S.WAITING: {S.RESERVED, S.RUNNING, S.FINISHED},
    S.RESERVED: {S.RUNNING, S.HELD, S.FINISHED},
    S.RUNNING: {S.WAITING, S.HELD, S.FINISHED},
    S.HELD: {S.FINISHED},
}
RUNNING: Final = S.RUNNING  # enum attributes are slow
ENDS_WITH_PROMPT: Final = frozenset({Phase.PREFILL, Phase.EMBED})


@dataclass(slots=True, eq=False)
class Request:
    id: str
    tokens: list[int]  # prompt, then generated tokens
    prompt_len: int
    limit: int  # total length at which it ends
    sampling: SamplingParams
    phase: Phase  # DECODE becomes FULL with `deliver`
    arrival: int  # order of admission within a priority
    root_hash: bytes  # parent of its first block
    pages: list[int] = field(default_factory=list)  # block table
    hashes: list[bytes] = field(default_factory=list)  # of full pages
    num_computed: int = 0  # leading tokens with KV in `pages`
    num_published: int = 0  # leading pages in the prefix cache
    num_cached_tokens: int = 0
    released: bool = False  # `release` came before the end
    num_generated: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    mask: TokenMask | None = None
    branch: int = 0  # index among n
    unwanted: set[int] = field(default_factory=set)  # branches cancelled before the fork
    priority: int = 0
    adapter: str = ""
    pools_all: bool = False  # EMBED: needs all tokens' states
    hidden: Any = None  # EMBED: pooled so far
    vector: bytes = b""
    in_flight: "Chunk | None" = None  # in a launched step
    row: Row = field(init=False)
    lifecycle: Lifecycle[RequestState] = field(init=False)

    def __post_init__(self) -> None:
        self.lifecycle = Lifecycle(f"request {self.id}", NEXT, S.WAITING)
        generated_from = self.prompt_len - self.num_generated
        self.row = Row(self.sampling, self.tokens, generated_from, self.eos_token_ids, self.mask)

    @property
    def state(self) -> RequestState:
        return self.lifecycle.state

    @property
    def upcoming(self) -> tuple[int, int]:
        """Start and count of the tokens to compute before the next draw, after a token in flight.

        The count is 0 if that token is the last, or if branches fork there.
        """
        flight = self.in_flight
        if flight is None:
            return self.num_computed, len(self.tokens) - self.num_computed
        end = flight.end
        if not flight.samples:
            return end, len(self.tokens) - end
        ends = end + 1 >= self.limit or self.phase in ENDS_WITH_PROMPT
        forks = end == self.prompt_len and self.sampling.n > 1
        return end, 0 if ends or forks else 1

    @property
    def exposed(self) -> bool:
        return self.state is S.RESERVED or (self.state is S.RUNNING and self.phase is Phase.PREFILL)

    @property
    def has_begun(self) -> bool:
        return len(self.tokens) > self.prompt_len

    @property
    def reads_prompt(self) -> bool:
        """Whether all prompt tokens' logits are needed, so that none may come from a cache."""
        told = self.row.prompt_logprobs
        return self.pools_all or (told is not None and len(told) < self.prompt_len - 1)

    def forked(self, branch: int) -> "Request":
        """A new branch without pages."""
        seed = branch_seed(self.sampling.seed, branch)
        return replace(
            self,
            tokens=list(self.tokens),
            sampling=msgspec.structs.replace(self.sampling, seed=seed, n=1, prompt_logprobs=None),
            pages=[],
            hashes=list(self.hashes),
            num_computed=0,
            num_published=0,
            mask=None if self.mask is None else self.mask.fork(),
            branch=branch,
            unwanted=set(),
        )

    def advance(self, to: RequestState) -> None:
        self.lifecycle.advance(to)


class Chunk(msgspec.Struct, frozen=True, eq=False):
    """Tokens `start` to `end`, computed in one step."""

    request: Request
    start: int
    end: int
    samples: bool  # includes the last token, so the next is drawn
    ahead: bool  # that token is still being drawn

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def dropped(self) -> bool:
        return self.request.lifecycle.state is not RUNNING
