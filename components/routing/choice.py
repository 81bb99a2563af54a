"""What a routing policy is asked, what it looks at and what it answers. No I/O: the simulator runs what production runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Identified(Protocol):
    """What has the id of an instance: its record, or its member in the load book."""

    @property
    def instance_id(self) -> str:
        """As it stands in etcd."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request that wants an instance."""

    num_tokens: int  # of the prompt, and after a move of what was generated
    session: str = ""  # what affinity goes by: requests with the same one belong together
    prefix: bytes = b""  # hash of the prompt's first tokens, for policies that hash
    explain: bool = False  # whether the answer is to tell the costs that were compared, if any: that takes time
    dry: bool = False  # a question without a request: the policy is to remember nothing of it


@dataclass(slots=True)
class Member:
    """One instance as the load book knows it. It lives as long as the instance, so that a decision makes no objects."""

    instance_id: str
    queued_tokens: int = 0  # prompt tokens sent to it and not computed, as far as is known
    running: int = 0  # requests there and on their way to it, each of n branches for itself
    used_pages: int = 0  # not free and not merely cached
    total_pages: int = 0
    prompt_tokens_per_s: float = 0.0  # computed lately; 0: not known
    page_size: int = 16  # tokens


class Choice(NamedTuple):
    """The instance chosen, and why: for spans and for `inspect route`."""

    member: Member
    why: str
    costs: Mapping[str, float] | None = (
        None  # by instance id, in the policy's own unit; None: nobody asked, or it has none
    )


class Policy(Protocol):
    """One way to choose. It may keep state of its own; its caller says what became of a choice through the load book."""

    def choose(self, ask: Ask, members: Sequence[Member], cached: Mapping[str, int], now_s: float) -> Choice | None:
        """One of `members`, which are by instance id; None when there is none.

        `cached` holds, by instance id, how many of the prompt's tokens an instance has in its prefix cache, where that is
        known and not zero.
        """
