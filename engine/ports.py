"""The engine's inputs and outputs: plain values, no socket, no task.

A request is submitted for one of four phases. Its pages are *exposed* while another process may read or write them
(PREFILL from the first chunk, DECODE from the reservation until `deliver`). Exposed pages outlive the request until
`release` says that no transfer touches them any more.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from components.errors import MeshError
from components.wire.block_hash import PromptBlocks
from components.wire.embed import EmbeddingModel
from components.wire.layout import KvLayout
from components.wire.logprobs import TokenLogprobs
from components.wire.sampling import SamplingParams

if TYPE_CHECKING:  # the mock engine starts without numpy
    import numpy as np
    import numpy.typing as npt


class Phase(StrEnum):
    FULL = auto()  # prompt and generation
    PREFILL = auto()  # prompt and first token; the pages stay for a transfer until `release`
    DECODE = auto()  # reserve pages for the prompt, wait for `deliver`, then generate
    EMBED = auto()  # the prompt alone, to a vector; the only phase of embedding models


class FinishReason(StrEnum):
    """In OpenAI's words."""

    STOP = auto()
    LENGTH = auto()


class TokenMask(Protocol):
    """The tokens that a branch may generate next (structured output).

    Called on the engine's thread. It must not raise: a text that violates its grammar gets the end token only, and
    has a `fault`.
    """

    def fill(self, allowed: "npt.NDArray[np.int32]") -> None:
        """Write every word of `allowed` [ceil(vocab / 32)]: bit i % 32 of word i // 32 is set if token i is
        allowed.

        At least one must be. End-of-sequence tokens are allowed only if their bits are set.
        """

    def accept(self, token_id: int) -> None:
        """A token was drawn, here or, for the first one, in another process."""

    def fork(self) -> "TokenMask":
        """A copy for another branch at the same position."""

    @property
    def is_complete(self) -> bool:
        """Whether only an end can follow: then the text ends without an end token."""

    @property
    def fault(self) -> str | None:
        """Why the text cannot end as required: the request fails with it."""


class EngineRequest(msgspec.Struct, frozen=True):
    """`request_id` is unique within the engine."""

    request_id: str
    token_ids: Sequence[int]  # the whole prompt, at least one token
    sampling: SamplingParams
    phase: Phase = Phase.FULL
    cache_salt: str = ""  # prefixes are shared only between equal salts
    num_generated: int = 0  # trailing token_ids that belong to the answer: a stream that has moved
    mask: TokenMask | None = None  # it has accepted those
    priority: int = 0  # as in vLLM: lower goes first
    adapter: str = ""  # one of `Engine.adapters`; "": none
    blocks: PromptBlocks | None = None  # of token_ids, if computed already


class TokenOutput(msgspec.Struct, frozen=True):
    """One step's tokens for one branch; `finish` is set on its last.

    A msgspec struct, since there is one per request and step: a frozen dataclass takes ten times as long to make.
    """

    request_id: str
    token_ids: list[int]
    finish: FinishReason | None = None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache; valid with branch 0's first token
    branch: int = 0
    logprobs: list[TokenLogprobs] | None = None  # one per token, if requested
    prompt_logprobs: list[TokenLogprobs] | None = (
        None  # of the prompt's tokens from the second on; with the first token
    )


@dataclass(frozen=True, slots=True)
class Reserved:
    """A DECODE request has its pages: KV may be written into `pages[num_cached_pages:]`; earlier ones are cached."""

    request_id: str
    pages: list[int]
    num_cached_pages: int


@dataclass(frozen=True, slots=True)
class Computed:
    """A PREFILL request has progressed: `pages` hold the KV of `num_computed` prompt tokens."""

    request_id: str
    pages: list[int]  # of the whole prompt, in order
    num_computed: int
    num_cached_tokens: int
    first_token: int | None = None  # set with the last chunk
    finish: FinishReason | None = None  # set if the first token is also the last
    logprobs: TokenLogprobs | None = None  # of the first token
    prompt_logprobs: list[TokenLogprobs] | None = None  # with the first token


@dataclass(frozen=True, slots=True)
class Embedded:
    request_id: str
    vector: bytes  # float32[dimensions], little-endian
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A request has failed with all branches; its unexposed pages are free."""

    request_id: str
    error: MeshError


# A block's hash, and whether the prefix cache holds it now. Its parent may be missing: evicted while a request held
# this one.
CacheEvent = tuple[bytes, bool]


class StepStats(msgspec.Struct, frozen=True):
    """One step's figures for metrics, heartbeats and the log: the engine measures, the service records."""

    step: int = 0  # never reset: a constant counter with waiting work is a hung engine
    num_running: int = 0
    num_waiting: int = 0  # queued for pages or budget
    num_reserved: int = 0  # DECODE requests whose KV has not arrived
    num_held: int = 0  # requests that are over with exposed pages
    prompt_tokens: int = 0  # computed in this step
    decode_tokens: int = 0  # sampled in this step
    free_pages: int = 0
    cached_pages: int = 0  # unreferenced but reusable
    held_pages: int = 0
    total_pages: int = 0
    step_s: float = 0.0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache, since start
    prefix_hits: int = 0  # of those, found
    retractions: int = 0  # since start
    forward: str = ""  # how the model ran: eager, compiled, graph; empty for a mock


class StepOutput(msgspec.Struct):
    """Everything that one step reports."""

    tokens: list[TokenOutput] = []
    reserved: list[Reserved] = []
    computed: list[Computed] = []
    embedded: list[Embedded] = []
    failed: list[Failed] = []
    cache_events: list[CacheEvent] = []  # in order; empty unless `kv_events` is set
    stats: StepStats = StepStats()


@dataclass(frozen=True, slots=True)
class KvRegion:
    """The page pool as NIXL registers it: `num_pages` pages of `layout.page_bytes` bytes from `address` on."""

    address: int
    num_pages: int
    layout: KvLayout
    device: str  # "cpu" or "cuda:0"

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.layout.page_bytes


class Pause(NamedTuple):
    """A step waits for its device."""

    reserved: list[Reserved]  # requests that got pages meanwhile; the step's output leaves them out
    wait_s: float  # when to continue; earlier is harmless


def max_request_pages(engine: "Engine") -> int:
    """Pages of the longest request."""
    return min(engine.kv_region.layout.pages_for(engine.max_context), engine.kv_region.num_pages)


class Recording(Protocol):
    """A recorded profile."""

    def save(self, path: Path) -> None:
        """Append it to `path` as a gzipped Chrome trace. On any thread; raises OSError."""


class Engine(Protocol):
    """The engine's interface. All but `prompt_blocks` and `peek_prefix` are called from the owning thread.

    Between steps, others may call what touches no device: all except the profile's calls, `deliver` to a request
    with branches (whose pages are copied), and a step that `computes`.
    """

    @property
    def kv_region(self) -> KvRegion:
        pass

    @property
    def max_context(self) -> int:
        """Prompt plus generated tokens of one request."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text."""

    @property
    def adapters(self) -> Mapping[str, str]:
        """Identity of each adapter's weights, by name."""

    @property
    def embedding(self) -> EmbeddingModel | None:
        """None: the model generates."""

    def prompt_blocks(self, token_ids: bytes, cache_salt: str = "", adapter: str = "") -> PromptBlocks:
        """Block hashes of a prompt, int32[T]. From any thread. Raises: UnknownModel: no such adapter."""

    def peek_prefix(self, blocks: PromptBlocks) -> int:
        """Cached tokens of a prompt right now. A hint, from any thread."""

    def cached_blocks(self) -> list[bytes]:
        """The sum of all cache events, including unreported ones."""

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises: PromptTooLong; UnknownModel; Rejected, naming the parameter and its bounds.

        A prompt must leave room for one token if any is to be generated. An answer that reaches `max_context` ends
        with "length".
        """

    def deliver(self, request_id: str, first_token: int, logprobs: TokenLogprobs | None = None) -> list[TokenOutput]:
        """A reserved request's KV has landed: it joins the batch. Returns its first token, to be sent at once.

        The list is empty if the request or its branch 0 was cancelled.
        Raises: Rejected, if there is no such token or the mask forbids it; the request stays reserved.
        """

    def recompute(self, request_id: str) -> None:
        """A DECODE request's KV will not come: queue it as FULL, at its old place. Its pages stay exposed.

        Unknown and delivered requests are ignored.
        """

    def cancel(self, request_id: str, branch: int | None = None) -> None:
        """Stop a request or one of its branches; exposed pages wait for `release`.

        The prompt is computed while any branch needs it. Unknown ids and branches are ignored: they may be over.
        """

    def release(self, request_id: str) -> None:
        """No transfer touches this request's exposed pages any more. Unknown ids are ignored."""

    def has_work(self) -> bool:
        """Whether a step would do anything."""

    def computes(self) -> bool:
        """Whether a step would use or wait for the device."""

    def wait_s(self) -> float:
        """Seconds until it should ask again for the next step's cores; 0: they are there. `step` waits otherwise."""

    def step(self) -> StepOutput:
        """Run one step: admit, compute one batch, sample. With `pipeline`, launch it and report the one before.

        Without work it only reports the pool.
        """

    def stepping(self) -> Iterator[Pause | StepOutput]:
        """As `step`, in pieces: a pause whenever it can only wait for a device, then the output.

        During a pause everything here may be called but another step. DECODE requests submitted then get free pages
        at once. An abandoned step reports nothing.
        """

    def rest(self) -> None:
        """There is no work for now: others may use the cores."""

    def start_profile(self, facts: Mapping[str, str]) -> None:
        """`facts` are written into the trace. Raises: Rejected, if there is nothing to record."""

    def stop_profile(self) -> Recording:
        pass
