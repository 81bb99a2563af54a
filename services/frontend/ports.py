"""What the HTTP side needs of the mesh."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from components.wire.embedding_model import EmbeddingModel
from components.wire.logprobs import TokenLogprobs
from components.wire.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt to generate from, `sampling.n` times. `request_id` is ours and random."""

    request_id: str
    model: str  # one of `Mesh.models`
    token_ids: list[int]
    sampling: Sampling
    cache_salt: str
    deadline_unix_ms: int
    priority: int = 0  # lower goes first
    session: str = ""  # prompts with the same one belong together


class TokenDelta(NamedTuple):
    """Every token that has arrived since the last delta, so that one delta is one write to the client."""

    token_ids: list[int]
    finish: str | None  # "stop" or "length", with the last tokens
    num_cached_tokens: int  # of the prompt; meaningful in branch 0's first delta
    logprobs: list[TokenLogprobs] | None = None  # one a token, when asked for
    prompt_logprobs: Sequence[TokenLogprobs] | None = None  # from its second token on; in branch 0's first delta


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts to make vectors of. `request_id` is ours and random."""

    request_id: str
    model: str  # one of `Mesh.models` that has an `embedding`
    token_ids: list[list[int]]
    deadline_unix_ms: int
    cache_salt: str = ""
    priority: int = 0  # lower goes first


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model, or an adapter of one, that at least one live decode instance serves."""

    name: str
    max_context: int  # tokens of prompt and answer together
    created_unix_s: int
    parent: str | None = None  # of an adapter: the model
    embedding: EmbeddingModel | None = None  # None: it generates


class FleetRoom(NamedTuple):
    """What all decode instances that take new work said last, together.

    What this frontend has sent since is not in it: admission counts its own requests itself, until their first tokens come.
    """

    held_tokens: int  # in pages that are neither free nor merely cached, no more than the capacity
    capacity_tokens: int | None  # of all pages; None: there is no instance
    num_waiting: int  # requests accepted that hold no page yet, each of n branches for itself, of all frontends


Offer = Callable[[TokenDelta], bool]  # returns whether it has taken the delta


class Mesh(Protocol):
    """The mesh as a request sees it."""

    def models(self) -> list[ServedModel]:
        """What can be asked for now; a look into memory."""

    def room(self) -> FleetRoom:
        """What decode carries; a look into memory."""

    async def embed(self, texts: Texts) -> list[bytes]:
        """Vectors of `texts`, in their order: float32[dimensions] each, little-endian. Raises: MeshError."""

    def generate(
        self, prompt: Prompt, offer: Offer | None = None
    ) -> AbstractAsyncContextManager[Sequence[AsyncGenerator[TokenDelta, None]]]:
        """The tokens of each branch of `prompt`, while inside.

        Closing a generator cancels the work on its branch, leaving the context that on all of them.
        For a prompt of one branch, `offer` is shown each delta between the first and the last that comes while whoever reads
        the branch waits, and what it takes the branch does not yield: no task has to wake for it.
        Raises: MeshError, on entering, before a branch's first delta or between two.
        """
