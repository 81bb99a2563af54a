"""What the HTTP side needs of the mesh."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from components.wire.embedding_model import EmbeddingModel
from components.wire.generate import StreamItem
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


class Sink(Protocol):
    """Where the tokens of a prompt's branches go, called from the event loop as they arrive."""

    def take(self, branch: int, item: StreamItem) -> bool:
        """Take the next tokens of a branch. Returns False if the branch is to be cancelled."""

    def fail(self, error: Exception) -> None:
        """A branch has ended with this error, and will not continue."""


class Branch(Protocol):
    """One branch that runs."""

    def close(self) -> None:
        """Cancel the branch if it still runs. Its sink is called no more."""


class Mesh(Protocol):
    """The mesh as a request sees it."""

    def models(self) -> list[ServedModel]:
        """Models that a request may name now; reads memory only."""

    def room(self) -> FleetRoom:
        """The load of decode; reads memory only."""

    async def embed(self, texts: Texts) -> list[bytes]:
        """Vectors of `texts`, in their order: float32[dimensions] each, little-endian. Raises: MeshError."""

    async def generate(self, prompt: Prompt, sink: Sink) -> Sequence[Branch]:
        """Have the branches of `prompt` generated; close each of them in the end.

        `sink` gets each token once, in order, though a branch may move between instances.
        Raises: MeshError, if no instance accepts the prompt; later errors go to `sink`.
        """
