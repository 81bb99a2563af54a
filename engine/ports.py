"""The engine's interface.

Pages are *exposed* while another process may access them. A PREFILL request exposes its pages from its first chunk on,
a DECODE request from the reservation until `deliver`. Exposed pages outlive their request, until `release`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

from components.errors import MeshError
from components.wire.embed import EmbeddingModel
from components.wire.layout import KvRegion
from components.wire.logprobs import TokenLogprobs
from components.wire.sampling import SamplingParams
from components.wire.step_stats import DraftCounts, StepStats
from components.wire.tokens import PromptBlocks

if TYPE_CHECKING:  # the mock engine starts without numpy
    import numpy as np
    import numpy.typing as npt


OVERTAKERS: Final = 256  # later arrivals that overtake a request for each step of priority
OVERTAKEN_TOKENS: Final = 256  # prompt tokens for which one more arrival overtakes a request


def turn(arrival: int, priority: int, num_tokens: int) -> tuple[int, int]:
    """Sort key of queued requests, in the frontend and in the engine. No request starves."""
    length = min(num_tokens // OVERTAKEN_TOKENS, OVERTAKERS - 1)
    return arrival + priority * OVERTAKERS + length, arrival


class Phase(StrEnum):
    FULL = auto()
    PREFILL = auto()  # prompt and first token
    DECODE = auto()  # reserve pages, wait for `deliver`, then generate
    EMBED = auto()  # prompt to vector


class FinishReason(StrEnum):
    STOP = auto()
    LENGTH = auto()


class TokenMask(Protocol):
    """The tokens that a branch may generate next. Used on the engine's thread.

    It must not raise: after a violation it allows only the end token and has a `fault`.
    """

    def fill(self, allowed: "npt.NDArray[np.int32]") -> None:
        """Write all of `allowed`, [ceil(vocab / 32)]: bit i % 32 of word i // 32 allows token i. Set at least one bit."""

    def accept(self, token_id: int) -> None:
        """Record a drawn token; the first may come from another process."""

    def allows(self, token_ids: Sequence[int]) -> int:
        """Return how many of `token_ids` may follow, one after the other. The state does not change."""

    def fork(self) -> "TokenMask": ...

    @property
    def is_complete(self) -> bool:
        """True if the text ends here, without an end token."""

    @property
    def fault(self) -> str | None:
        """The reason why the text cannot satisfy the constraint; None if it can."""


class EngineRequest(msgspec.Struct, frozen=True):
    request_id: str  # unique within the engine
    token_ids: Sequence[int]  # at least one
    sampling: SamplingParams
    phase: Phase = Phase.FULL
    cache_salt: str = ""  # prefixes are shared only between equal salts
    num_generated: int = 0  # how many of the last token_ids belong to the answer; 0 unless the stream moved
    mask: TokenMask | None = None  # has accepted these num_generated tokens
    priority: int = 0  # lower is served first
    adapter: str = ""  # "": none
    blocks: PromptBlocks | None = None
    prediction: Sequence[int] = ()  # tokens that the answer may repeat: a source of drafts


class TokenOutput(msgspec.Struct, frozen=True):
    """The tokens that one step drew for a branch. A struct, because a frozen dataclass takes ten times as long to create."""

    request_id: str
    token_ids: list[int]
    finish: FinishReason | None = None
    num_cached_tokens: int = 0  # prompt tokens from the prefix cache; set with branch 0's first token
    branch: int = 0
    logprobs: list[TokenLogprobs] | None = None  # one per token
    prompt_logprobs: list[TokenLogprobs] | None = None  # from the second prompt token on
    draft_counts: DraftCounts | None = None  # of the branch so far, if the step checked drafts


@dataclass(frozen=True, slots=True)
class Exposed:
    """The block table of a request with exposed pages. Its first `num_computed` tokens have KV, or need no KV.

    Prefill may write the other pages of a DECODE request. A PREFILL request is reported after each chunk.
    """

    request_id: str
    pages: list[int]
    num_computed: int  # of a DECODE request: whole leading pages, cached or read by no layer
    num_cached_tokens: int
    first_token: int | None = None  # with the last chunk
    finish: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class Embedded:
    request_id: str
    vector: bytes  # float32[dimensions], little-endian
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A failed request. All its branches have ended; its unexposed pages are free."""

    request_id: str
    error: MeshError


# (block hash, True if stored, False if evicted). The parent of a stored block may be evicted already.
CacheEvent = tuple[bytes, bool]


class StepOutput(msgspec.Struct):
    tokens: list[TokenOutput] = []
    reserved: list[Exposed] = []  # DECODE requests that got pages
    computed: list[Exposed] = []  # PREFILL requests with a new chunk
    embedded: list[Embedded] = []
    failed: list[Failed] = []
    cache_events: list[CacheEvent] = []  # in order
    stats: StepStats = StepStats()


class Pause(NamedTuple):
    reserved: list[Exposed]  # new since the last pause; not repeated in the step's output
    wait_s: float  # until the device should be checked again; an earlier check does no harm


def max_request_pages(engine: "Engine") -> int:
    return min(engine.kv_region.layout.pages_for(engine.max_context), engine.kv_region.num_pages)


class Recording(Protocol):
    def save(self, path: Path) -> None:
        """Append it to `path` as a gzipped Chrome trace, on any thread.

        Raises: OSError.
        """


class Engine(Protocol):
    """Any thread may call `prompt_blocks`, `peek_prefix` and `continues`; only the owning thread calls the rest.

    Exception: between steps, another thread may call methods that do not use the device. These use it: profiling, `deliver`
    to a request with several branches, and a step for which `computes()` is true.
    """

    @property
    def kv_region(self) -> KvRegion:
        pass

    @property
    def max_context(self) -> int:
        """Prompt plus generated tokens of a request."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def adapters(self) -> Mapping[str, str]:
        """Identity of each adapter's weights, by name."""

    @property
    def embedding(self) -> EmbeddingModel | None:
        """None if the model generates text."""

    def prompt_blocks(self, token_ids: bytes, cache_salt: str = "", adapter: str = "") -> PromptBlocks:
        """Block hashes of a prompt, int32[T].

        Raises: UnknownModel, if there is no such adapter.
        """

    def peek_prefix(self, blocks: PromptBlocks) -> int:
        """Return the prompt tokens in the prefix cache. They may be evicted before the request is admitted."""

    def continues(self, num_tokens: int, sampling: SamplingParams, first_token: int) -> bool:
        """Return whether an answer continues after `first_token`, for a prompt of `num_tokens`."""

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. An answer that reaches `max_context` ends with "length".

        Raises: PromptTooLong, if there is no room for a token to generate; UnknownModel; Rejected, naming the parameter
            and its bounds.
        """

    def deliver(self, request_id: str, first_token: int, logprobs: TokenLogprobs | None = None) -> list[TokenOutput]:
        """Start a reserved request, whose KV has arrived.

        Returns: its first token, to be sent at once; nothing if the request or its branch 0 was cancelled.
        Raises: Rejected, if there is no such token or the mask forbids it; the request stays reserved.
        """

    def recompute(self, request_id: str, first_token: int | None = None) -> None:
        """Queue a DECODE request again as FULL, at its old place in the queue, because its KV will not arrive.

        Its old pages stay exposed. Unknown and delivered requests are ignored.

        Args:
            first_token: a token that the client already has, which is not drawn again.
        """

    def cancel(self, request_id: str, branch: int | None = None) -> None:
        """End a request or one branch; unknown ones are ignored."""

    def release(self, request_id: str) -> None:
        """End the exposure of a request's pages; call it when no transfer uses them. Unknown ids are ignored."""

    def has_work(self) -> bool: ...

    def computes(self) -> bool:
        """Return whether a step would use the device, wait for it, or copy pages."""

    def wait_s(self) -> float:
        """Return the seconds until the next attempt to get CPU cores for a step; 0 if the engine has them."""

    def step(self) -> StepOutput:
        """Run one step and report it; with `pipeline`, report the previous one. Without work, report the pool's state."""

    def stepping(self) -> Iterator[Pause | StepOutput]:
        """Run a step, with a pause whenever it waits for the device.

        During a pause all other calls are allowed. DECODE requests get free pages at once.
        """

    def rest(self) -> None:
        """Lend this engine's cores to other workers. Call it when the engine has no work."""

    def start_profile(self, facts: Mapping[str, str]) -> None:
        """Record a profile; `facts` are written into the trace.

        Raises: Rejected, if there is nothing to record.
        """

    def stop_profile(self) -> Recording:
        pass

    def on_loss(self, callback: Callable[[Exception], None]) -> None:
        """Call `callback` once, on any thread, if another process that computes for this engine is lost."""

    def close(self) -> None:
        """Stop the processes of other ranks. Call it last."""
