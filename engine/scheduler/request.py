"""A request in the scheduler, and its states."""

from dataclasses import dataclass, field, replace
from enum import StrEnum, auto
from typing import TYPE_CHECKING, Any, Final

import msgspec

from components.lifecycle import Lifecycle
from components.wire.sampling import SamplingParams
from engine.ports import Phase, TokenMask
from engine.sampling.branches import branch_seed
from engine.sampling.row import Row

if TYPE_CHECKING:
    from engine.scheduler.scheduler import Chunk


class RequestState(StrEnum):
    WAITING = auto()  # queued without pages, new or preempted
    RESERVED = auto()  # DECODE: has pages, into which another process writes the KV
    RUNNING = auto()  # in the batch
    HELD = auto()  # over, but a transfer may still touch its pages
    FINISHED = auto()  # over; pages go back when no step in flight writes into them


S = RequestState
NEXT: Final = {  # a state without a row is terminal
    S.WAITING: {S.RESERVED, S.RUNNING, S.FINISHED},
    S.RESERVED: {S.RUNNING, S.HELD, S.FINISHED},
    S.RUNNING: {S.WAITING, S.HELD, S.FINISHED},
    S.HELD: {S.FINISHED},
}


ENDS_WITH_PROMPT: Final = frozenset({Phase.PREFILL, Phase.EMBED})


@dataclass(slots=True, eq=False)
class Request:
    id: str
    tokens: list[int]  # prompt, then generated tokens
    prompt_len: int
    limit: int  # total length at which it ends with "length"
    sampling: SamplingParams
    phase: Phase  # DECODE becomes FULL with `deliver`
    arrival: int  # ascending; order of admission within a priority, and reverse order of preemption
    root_hash: bytes  # parent of its first block
    pages: list[int] = field(default_factory=list)  # block table
    hashes: list[bytes] = field(default_factory=list)  # of full pages of `tokens`, as far as needed
    num_computed: int = 0  # leading tokens with KV in `pages`
    num_published: int = 0  # leading pages in the prefix cache
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at admission
    released: bool = False  # `release` came before the end: nothing will be held
    num_generated: int = 0  # trailing prompt tokens that belong to the answer: see `EngineRequest`
    eos_token_ids: frozenset[int] = frozenset()
    mask: TokenMask | None = None
    branch: int = 0  # index among n
    unwanted: set[int] = field(default_factory=set)  # branches cancelled before they existed
    priority: int = 0  # lower goes first
    adapter: str = ""  # by name; "": none
    pools_all: bool = False  # EMBED: all tokens' hidden states count
    hidden: Any = None  # EMBED: pooled so far, on the device
    vector: bytes = b""  # EMBED: the result
    in_flight: "Chunk | None" = None  # in the latest launched step, until it lands
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
        """Start of its next chunk, and tokens to compute before the next one can be sampled.

        It starts after computed tokens and those in flight, and includes a token that is still being drawn. If that
        token is known to be the last, or branches fork at it, there is nothing to compute until the step has
        landed.
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
        """Whether logits of other prompt tokens than the last are needed: then none may come from a cache."""
        told = self.row.prompt_logprobs
        return self.pools_all or (told is not None and len(told) < self.prompt_len - 1)

    def forked(self, branch: int) -> "Request":
        """A new branch without pages, before anything was generated."""
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
        """Raises: IllegalTransition, off the table."""
        self.lifecycle.advance(to)
