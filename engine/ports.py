"""What goes into the engine and what comes out: plain values, no socket, no task. The mock engine speaks the same.

A request is submitted for one of four phases. Its pages are *exposed* while another process may read or write them
(PREFILL from the first chunk, DECODE from the reservation until `deliver`): exposed pages outlive the request, whatever
becomes of it, until `release` says that no transfer touches them any more.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from components.errors import MeshError
from components.kv_transfer.layout import KvLayout
from components.routing.block_hash import PromptBlocks
from components.wire.embedding_model import EmbeddingModel
from components.wire.logprobs import TokenLogprobs

if TYPE_CHECKING:  # the mock engine starts without numpy
    import numpy as np
    import numpy.typing as npt


class Phase(StrEnum):
    """Which part of a request an engine is asked to do."""

    FULL = auto()  # prompt and generation
    PREFILL = auto()  # prompt and first token; the pages stay for a transfer until `release`
    DECODE = auto()  # reserve pages for the prompt, wait for `deliver`, then generate
    EMBED = auto()  # the prompt alone, to a vector: of models that make embeddings, and the only one of theirs


class FinishReason(StrEnum):
    """Why a request stopped, in OpenAI's words."""

    STOP = auto()
    LENGTH = auto()


class SamplingParams(msgspec.Struct, frozen=True):
    """How tokens are drawn. The draw at position p depends on (seed, p) alone, never on the batch.

    In this order: the penalties change the model's logits, `logit_bias` is added, tokens that are not allowed are
    masked, the rest is divided by the temperature, and min_p, top_k and top_p cut what is left, each what the one
    before it left. `engine.sampling.check` has the bounds.
    """

    max_tokens: int
    temperature: float = 1.0  # 0 means greedy
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0  # of the most probable token's probability
    presence_penalty: float = 0.0  # once for each token generated so far
    frequency_penalty: float = 0.0  # for each time it was generated
    repetition_penalty: float = 1.0  # of tokens in the prompt or generated; divides positive logits
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what to add), no id twice
    min_tokens: int = 0  # until then no token is drawn that would end the text
    logprobs: int | None = None  # alternatives to report with each token; 0: the chosen one alone
    prompt_logprobs: int | None = None  # the same for the prompt, which is then computed whole, cached or not
    n: int = 1  # branches that share the prompt; each has a seed derived from `seed`, branch 0 `seed` itself


class TokenMask(Protocol):
    """What a request's next token may be: structured output, seen from the engine, which knows no grammar.

    It belongs to one branch of one request and is called on the engine's thread. It must not raise: a request whose
    text went off its grammar allows the token that ends it, and has a `fault`.
    """

    def fill(self, allowed: "npt.NDArray[np.int32]") -> None:
        """Write every word of `allowed` [ceil(vocab / 32)]: bit i % 32 of word i // 32 is set when token i may come.

        At least one must be. An end-of-sequence token is nothing special here: it comes only where its bit is set.
        """

    def accept(self, token_id: int) -> None:
        """The token that was drawn, or the first one, when another process drew it."""

    def fork(self) -> "TokenMask":
        """One of its own for another branch that has got as far."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end can follow what was accepted: then the text is over without one."""

    @property
    def fault(self) -> str | None:
        """Why the text cannot come to an end that it was to have: the request fails with it."""


class EngineRequest(msgspec.Struct, frozen=True):
    """One request as the engine sees it; `request_id` is unique within the engine."""

    request_id: str
    token_ids: Sequence[int]  # the whole prompt, at least one token
    sampling: SamplingParams
    phase: Phase = Phase.FULL
    cache_salt: str = ""  # prefixes are shared among equal salts only
    num_generated: int = 0  # of token_ids, the last ones that are the answer's already: a stream that has moved
    mask: TokenMask | None = None  # has seen those
    priority: int = 0  # as in vLLM: lower goes first
    adapter: str = ""  # one of `Engine.adapters`; "": the model as it is
    blocks: PromptBlocks | None = None  # of token_ids, where somebody has asked for them: they need not be made again


class TokenOutput(msgspec.Struct, frozen=True):
    """Tokens that one step made for one branch of a request; `finish` is set on the branch's last.

    A struct of msgspec's, because there is one for each request in each step: a named tuple takes three times as long to make,
    a frozen dataclass ten times.
    """

    request_id: str
    token_ids: list[int]
    finish: FinishReason | None = None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache; meaningful with branch 0's first token
    branch: int = 0
    logprobs: list[TokenLogprobs] | None = None  # one a token, when asked for
    prompt_logprobs: list[TokenLogprobs] | None = (
        None  # of the prompt's tokens from the second on; with the first token
    )


@dataclass(frozen=True, slots=True)
class Reserved:
    """A DECODE request has its pages: KV may be written into `pages[num_cached_pages:]`; those before are right already."""

    request_id: str
    pages: list[int]
    num_cached_pages: int


@dataclass(frozen=True, slots=True)
class Computed:
    """A PREFILL request has progressed: the KV of `num_computed` prompt tokens stands in `pages`."""

    request_id: str
    pages: list[int]  # of the whole prompt, in order
    num_computed: int
    num_cached_tokens: int
    first_token: int | None = None  # set with the last chunk
    finish: FinishReason | None = None  # set when the first token is also the last
    logprobs: TokenLogprobs | None = None  # of the first token
    prompt_logprobs: list[TokenLogprobs] | None = None  # with the first token


@dataclass(frozen=True, slots=True)
class Embedded:
    """An EMBED request is done."""

    request_id: str
    vector: bytes  # float32[dimensions], little-endian
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A request cannot go on, nor any of its branches; its unexposed pages are free again."""

    request_id: str
    error: MeshError


# A block by its hash, and whether the prefix cache holds it from now on. The block before it may be missing: it was evicted
# while a request held this one.
CacheEvent = tuple[bytes, bool]


class StepStats(msgspec.Struct, frozen=True):
    """What one step did, for metrics, heartbeats and the log line; the engine measures, the service records."""

    step: int = 0  # counts up for ever: a counter that stands still while work waits is a hung engine
    num_running: int = 0
    num_waiting: int = 0  # queued for pages or budget
    num_reserved: int = 0  # DECODE requests whose KV has not arrived
    num_held: int = 0  # requests that are over but whose pages are still exposed
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
    forward: str = ""  # how the model ran: eager, compiled, graph; a mock's does not


class StepOutput(msgspec.Struct):
    """Everything one step has to tell, in one value."""

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
        """Size of the whole pool."""
        return self.num_pages * self.layout.page_bytes


class Pause(NamedTuple):
    """A step waits for its device."""

    reserved: list[Reserved]  # have got their pages meanwhile; the step's output leaves them out
    wait_s: float  # after which to go on; earlier is no harm


def max_request_pages(engine: "Engine") -> int:
    """Pages that the longest request fills."""
    return min(engine.kv_region.layout.pages_for(engine.max_context), engine.kv_region.num_pages)


class Recording(Protocol):
    """A profile that was recorded."""

    def save(self, path: Path) -> None:
        """Append it to `path` as a gzipped Chrome trace. On any thread; raises OSError."""


class Engine(Protocol):
    """The engine's face. All but `prompt_blocks` and `peek_prefix` are called from the one thread that owns it.

    While no step is under way or in flight others may call it in its place, for what touches no device: all but the profile's
    calls, `deliver` to a request with branches, whose pages are copied, and a step that `computes`.
    """

    @property
    def kv_region(self) -> KvRegion:
        """Where the pages are."""

    @property
    def max_context(self) -> int:
        """Prompt plus generated tokens that one request may have."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text."""

    @property
    def adapters(self) -> Mapping[str, str]:
        """LoRA adapters that requests may name, and what identifies the weights of each."""

    @property
    def embedding(self) -> EmbeddingModel | None:
        """What vectors it makes; None: it generates."""

    def prompt_blocks(self, token_ids: bytes, cache_salt: str = "", adapter: str = "") -> PromptBlocks:
        """What prefix caches call the pages of a prompt, int32[T]. From any thread. Raises: UnknownModel: no such adapter."""

    def peek_prefix(self, blocks: PromptBlocks) -> int:
        """Tokens of a prompt that the prefix cache holds right now. A hint, callable from any thread."""

    def cached_blocks(self) -> list[bytes]:
        """All that the events so far add up to, those not yet told included."""

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises: PromptTooLong, if it could never fit; Rejected, naming the parameter and its bounds."""

    def deliver(self, request_id: str, first_token: int, logprobs: TokenLogprobs | None = None) -> list[TokenOutput]:
        """A reserved request's KV has landed: it joins the batch. Returns its first token, to be sent at once.

        Raises: Rejected, when that token cannot be its first one: then it is reserved still, to be cancelled or recomputed.
        """

    def recompute(self, request_id: str) -> None:
        """A DECODE request's KV will not come: compute the prompt here, in other pages than any exposed ones.

        It may be queued for pages still. Unknown ids, and requests that were delivered, are ignored.
        """

    def cancel(self, request_id: str, branch: int | None = None) -> None:
        """Stop working on a request, or on one of its branches; exposed pages wait for `release`.

        The prompt is computed as long as there is a branch that wants it: one that is cancelled before never begins.
        Unknown ids and branches are ignored: they may be over.
        """

    def release(self, request_id: str) -> None:
        """No transfer touches the exposed pages of this request any more: give them back. Unknown ids are ignored."""

    def has_work(self) -> bool:
        """Whether a step would do anything."""

    def computes(self) -> bool:
        """Whether a step would have the device compute, or wait for it."""

    def wait_s(self) -> float:
        """After how long to ask again whether the next step would compute at once; 0: it would. `step` waits otherwise."""

    def step(self) -> StepOutput:
        """Run one step: admit, compute one batch, sample. With `pipeline` launch it, and tell what the one before it gave."""

    def stepping(self) -> Iterator[Pause | StepOutput]:
        """The same in pieces: a pause whenever there is nothing to do but wait for a device, and at last the output.

        During a pause everything here may be called but another step. One that is given up is never heard of.
        """

    def rest(self) -> None:
        """There is nothing to do for now: others may have what it would compute with."""

    def start_profile(self, facts: Mapping[str, str]) -> None:
        """Record what is computed from here on; `facts` stand in the trace. Raises: Rejected, without anything to record."""

    def stop_profile(self) -> Recording:
        """End the profile that was started."""
