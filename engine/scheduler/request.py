"""One request as the scheduler keeps it, and the states it may go through."""

from dataclasses import dataclass, field, replace
from enum import StrEnum, auto
from typing import TYPE_CHECKING, Any, Final

import msgspec

from components.lifecycle import Lifecycle
from engine.ports import Phase, SamplingParams, TokenMask
from engine.sampling.branches import branch_seed
from engine.sampling.row import Row

if TYPE_CHECKING:
    from engine.scheduler.scheduler import Chunk


class RequestState(StrEnum):
    """Life of one request inside the engine."""

    WAITING = auto()  # queued, without pages; a retracted request comes back to it
    RESERVED = auto()  # DECODE: has its pages, another process writes the KV into them
    RUNNING = auto()  # in the batch, its prompt or its next token being computed
    HELD = auto()  # over, but a transfer may still touch its pages
    FINISHED = auto()  # over; its pages are given back as soon as no step in flight writes into them


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
    """One request from submit to its end. Mutable, and owned by whoever has the engine."""

    id: str
    tokens: list[int]  # prompt, then what was generated
    prompt_len: int
    limit: int  # tokens, prompt included, at which it ends for length
    sampling: SamplingParams
    phase: Phase  # DECODE becomes FULL with `deliver`: from then on nothing sets it apart
    arrival: int  # counts up; within a priority admission goes by it, retraction against it
    root_hash: bytes  # parent of its first block
    pages: list[int] = field(default_factory=list)  # block table
    hashes: list[bytes] = field(default_factory=list)  # of the full pages of `tokens`, as far as they were needed
    num_computed: int = 0  # leading tokens whose KV stands in `pages`
    num_published: int = 0  # leading pages that the prefix cache was told of
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache at admission
    released: bool = False  # `release` came before the end: nothing needs to be held
    num_generated: int = 0  # last tokens of the prompt that are the answer's: see `EngineRequest`
    eos_token_ids: frozenset[int] = frozenset()
    mask: TokenMask | None = None
    branch: int = 0  # which of n
    unwanted: set[int] = field(default_factory=set)  # branches that were cancelled before there were any
    priority: int = 0  # lower goes first
    adapter: str = ""  # LoRA adapter, by name; "": the model as it is
    pools_all: bool = False  # EMBED: each token's hidden state counts
    hidden: Any = None  # EMBED: what the runner has pooled so far, on the device
    vector: bytes = b""  # EMBED: what has come of it
    in_flight: "Chunk | None" = None  # what the latest step that was launched computes of it, until that step lands
    row: Row = field(init=False)
    lifecycle: Lifecycle[RequestState] = field(init=False)

    def __post_init__(self) -> None:
        self.lifecycle = Lifecycle(f"request {self.id}", NEXT, S.WAITING)
        generated_from = self.prompt_len - self.num_generated
        self.row = Row(self.sampling, self.tokens, generated_from, self.eos_token_ids, self.mask)

    @property
    def state(self) -> RequestState:
        """Where it is now."""
        return self.lifecycle.state

    @property
    def upcoming(self) -> tuple[int, int]:
        """Where its next chunk begins, and how many tokens there are to compute before the next one can be sampled.

        It begins behind what stands, and what is in flight. The token that a step in flight will draw is one of them.
        Where it is certain to be the last one, or branches begin with it, there is nothing to compute until the step has
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
        """Whether another process may be reading or writing the pages."""
        return self.state is S.RESERVED or (self.state is S.RUNNING and self.phase is Phase.PREFILL)

    @property
    def has_begun(self) -> bool:
        """Whether it has its first token, and with it all its branches."""
        return len(self.tokens) > self.prompt_len

    @property
    def reads_prompt(self) -> bool:
        """Whether more than the last of the prompt's tokens is to be looked at: then none of them may come from a cache."""
        told = self.row.prompt_logprobs
        return self.pools_all or (told is not None and len(told) < self.prompt_len - 1)

    def forked(self, branch: int) -> "Request":
        """Another branch of this request, before anything was generated. It has no pages yet."""
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
        """Move to state `to`. Raises: IllegalTransition, off the table."""
        self.lifecycle.advance(to)
