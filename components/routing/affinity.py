"""Rendezvous hashing with bounded load: equal keys go to the same instance while it is not too full. No state is
shared.

Each instance has a score for a key, and the highest wins. A leaving instance moves only its own keys, and a new one
takes an equal share from all.
Sources: Thaler and Ravishankar 1998, "Using name-based mappings to increase hit rates"; Mirrokni et al. 2018,
"Consistent hashing with
bounded loads", arXiv:1608.01350.
"""

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from random import Random
from typing import Final, Literal

from components.routing.choice import Ask, Choice, Identified, Member
from components.routing.load import Load, lowest

LOAD_FACTOR: Final = 1.25  # an instance takes no keys above this multiple of the mean and the slack
SLACK_TOKENS: Final = 8192  # with little load, one request is far above the mean
_MASK: Final = (1 << 64) - 1
_MIX: Final = 0x9E3779B97F4A7C15  # odd, 2^64 / golden ratio: multiplying spreads the bits upwards
_MIX_AGAIN: Final = 0xD6E8FEB86659FD93


class Rendezvous:
    def __init__(self) -> None:
        self._names: dict[str, int] = {}

    def scores(self, key: bytes, members: Sequence[Identified]) -> list[int]:
        """64 bits for each of `members`, equal in every process."""
        hashed = _hash(key)
        names = self._of(members)
        mixed = [((name ^ hashed) * _MIX) & _MASK for name in names]
        return [((one ^ (one >> 32)) * _MIX_AGAIN) & _MASK for one in mixed]

    def _of(self, members: Sequence[Identified]) -> list[int]:
        known = self._names
        try:
            return [known[m.instance_id] for m in members]
        except KeyError:
            if len(known) > 2 * len(members):  # drop instances that are gone
                known.clear()
            for m in members:
                known[m.instance_id] = _hash(m.instance_id.encode())
            return [known[m.instance_id] for m in members]


def _hash(text: bytes) -> int:
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


Instead = Literal["next", "least_load"]


def session_or_prefix(ask: Ask) -> bytes:
    """The key of `consistent_hashing`."""
    return ask.session.encode() or ask.prefix


def prefix_only(ask: Ask) -> bytes:
    """The key of `prefix_hash`."""
    return ask.prefix


class BoundedHashing:
    """The highest score for the request's key, if its load is at most `load_factor` times the mean and
    `slack_tokens`.

    Otherwise the next by score, so that a key's requests still meet, or the least loaded. A request without a key
    goes to the least loaded.
    """

    def __init__(
        self,
        rng: Random,
        load: Load,
        key: Callable[[Ask], bytes],
        instead: Instead,
        *,
        load_factor: float = LOAD_FACTOR,
        slack_tokens: float = SLACK_TOKENS,
    ) -> None:
        if load_factor < 1 or slack_tokens < 0:
            raise ValueError("a load factor below 1, or less slack than none, might leave nobody to choose")
        self._rng = rng
        self._load = load
        self._key = key
        self._instead = instead
        self._factor = load_factor
        self._slack = slack_tokens
        self._rendezvous = Rendezvous()

    def choose(self, ask: Ask, members: Sequence[Member], cached: Mapping[str, int], now_s: float) -> Choice | None:
        if not members:
            return None
        loads = [self._load(m, 0) for m in members]
        key = self._key(ask)
        if not key:
            return Choice(members[lowest(loads, self._rng)], "least load: no key")
        scores = self._rendezvous.scores(key, members)
        first = scores.index(max(scores))
        bound = self._factor * sum(loads) / len(loads) + self._slack
        if loads[first] <= bound:
            return Choice(members[first], "its key")
        if self._instead == "next":
            other = max((i for i, load in enumerate(loads) if load <= bound), key=scores.__getitem__)
        else:
            other = lowest(loads, self._rng)
        return Choice(members[other], f"{members[first].instance_id} is too full for its key")
