"""The interface of routing policies. No I/O: the simulator runs the same code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Identified(Protocol):
    @property
    def instance_id(self) -> str:
        pass


@dataclass(frozen=True, slots=True)
class Ask:
    num_tokens: int  # of the prompt, and after a move of the generated text
    session: str = ""  # key of session affinity
    prefix: bytes = b""  # hash of the prompt's first tokens
    explain: bool = False  # whether to report the compared costs, which takes time
    dry: bool = False  # a question without a request: the policy must not remember it


@dataclass(slots=True)
class Member:
    """An instance in the load book. It lives as long as the instance, so a decision allocates nothing."""

    instance_id: str
    queued_tokens: int = 0  # prompt tokens sent to it and not known to be computed
    running: int = 0  # requests there and on their way, each branch counted
    used_pages: int = 0  # neither free nor merely cached
    total_pages: int = 0
    prompt_tokens_per_s: float = 0.0  # recent speed; 0: unknown
    page_size: int = 16  # tokens


class Choice(NamedTuple):
    """The chosen instance and the reason, for spans and `inspect route`."""

    member: Member
    why: str
    costs: Mapping[str, float] | None = None  # by instance id, in the policy's unit; None: not requested, or no costs


class Policy(Protocol):
    """It may keep state; the load book reflects what became of its choices."""

    def choose(self, ask: Ask, members: Sequence[Member], cached: Mapping[str, int], now_s: float) -> Choice | None:
        """One of `members`, which are sorted by id; None if there are none.

        `cached`: by instance id, cached tokens of the prompt, if known and not zero.
        """
