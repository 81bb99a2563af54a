"""The interface between the HTTP side and the mesh."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from components.output.plan import OutputPlan
from components.wire.embed import EmbeddingModel
from components.wire.generate import StreamItem
from components.wire.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to generate, and how the frontend shows it."""

    request_id: str  # ours and random
    model: str  # one of `Mesh.models`
    token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str
    deadline_unix_ms: int
    num_generated: int = 0  # after a move: how many of the last token ids belong to the answer
    priority: int = 0  # lower goes first
    session: str = ""  # equal for prompts that belong together
    prediction: Sequence[int] = ()  # tokens that the answer may repeat
    # the fields below are used by the frontend only
    stops: Sequence[str] = ()
    echo: str = ""  # shown before the generated text; not searched for stop strings
    generates: bool = True  # False: the answer is the prompt alone; the mesh generates one token, which is dropped
    continues: bool = False  # the answer continues the prompt's text
    output: OutputPlan | None = None  # how to parse the text; None: it is shown as it is
    shows_special: bool = False  # show special tokens as text
    shows_end: bool = False  # show the stop string, or the token that ends the answer
    echo_alternatives: int | None = None  # log-probabilities per prompt token, shown before the first token


@dataclass(frozen=True, slots=True)
class Texts:
    request_id: str  # ours and random
    model: str  # one of `Mesh.models` that has an `embedding`
    token_ids: list[list[int]]
    deadline_unix_ms: int
    cache_salt: str = ""
    priority: int = 0  # lower goes first


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    max_context: int  # tokens of prompt and answer
    created_unix_s: int
    parent: str | None = None  # an adapter's base model
    embedding: EmbeddingModel | None = None  # None: it generates text


class FleetRoom(NamedTuple):
    """The load of all decode instances that take new work, by their last heartbeats."""

    held_tokens: int  # capacity of the pages that requests hold
    capacity_tokens: int | None  # capacity of all pages; None: no instance
    num_waiting: int  # accepted branches of all frontends that hold no page yet


class Sink(Protocol):
    def add_tokens(self, branch: int, item: StreamItem) -> bool:
        """Returns False to cancel the branch."""

    def fail(self, error: Exception) -> None:
        pass


class Branch(Protocol):
    def close(self) -> None:
        """Cancel the branch if it is running. Its sink is not called again."""


class Mesh(Protocol):
    def models(self) -> list[ServedModel]:
        """Return the models that requests may name now."""

    def listed_models(self) -> list[ServedModel]:
        """Return `models`, or the last known ones while there is no instance: clients drop a model that is not listed."""

    def room(self) -> FleetRoom:
        pass

    async def embed(self, texts: Texts) -> list[bytes]:
        """A vector for each text: float32[dimensions], little-endian. Raises: MeshError."""

    async def generate(self, prompt: Prompt, sink: Sink) -> Sequence[Branch]:
        """Start the branches of `prompt`; the caller closes each of them.

        `sink` gets each token once and in order, also if a branch moves. It gets later errors, too.
        Raises: MeshError, if no instance accepts the prompt.
        """
