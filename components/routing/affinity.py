"""Policies that send requests with the same key to one instance: hashing and sessions."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from random import Random
from typing import Final, Literal

from components.routing.policy import (
    BY_ID,
    Cached,
    HasInstanceId,
    Load,
    Member,
    Policy,
    PolicyChoice,
    RouteRequest,
    lowest,
)

LOAD_FACTOR: Final = 1.25  # multiple of the mean load, plus the slack, above which an instance gets no key
SLACK_TOKENS: Final = 8192  # because in an idle fleet, a single request is far above the mean
_MASK: Final = (1 << 64) - 1
_MIX: Final = 0x9E3779B97F4A7C15  # odd, 2^64 / golden ratio: multiplying spreads the bits upwards
_MIX_AGAIN: Final = 0xD6E8FEB86659FD93


class Rendezvous:
    """If an instance leaves, only its own keys move. A new one takes an equal share from the others.

    Source: Thaler and Ravishankar 1998, "Using name-based mappings to increase hit rates".
    """

    def __init__(self) -> None:
        self._names: dict[str, int] = {}

    def scores(self, key: bytes, members: Sequence[HasInstanceId]) -> list[int]:
        """64 bits per member, the same in every process. The highest score owns the key."""
        hashed = _hash(key)
        names = self._of(members)
        mixed = [((name ^ hashed) * _MIX) & _MASK for name in names]
        return [((one ^ (one >> 32)) * _MIX_AGAIN) & _MASK for one in mixed]

    def _of(self, members: Sequence[HasInstanceId]) -> list[int]:
        known = self._names
        try:
            return [known[m.instance_id] for m in members]
        except KeyError:
            if len(known) > 2 * len(members):  # drop instances that have left
                known.clear()
            for m in members:
                known[m.instance_id] = _hash(m.instance_id.encode())
            return [known[m.instance_id] for m in members]


def _hash(text: bytes) -> int:
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


Instead = Literal["next", "least_load"]


def session_or_prefix(request: RouteRequest) -> bytes:
    return request.session.encode() or request.prefix


def prefix_only(request: RouteRequest) -> bytes:
    return request.prefix


class BoundedHashing:
    """If the key's instance is too full, take the next by score, or the least loaded.

    Source: Mirrokni et al. 2018, "Consistent hashing with bounded loads", arXiv:1608.01350.
    """

    def __init__(
        self,
        rng: Random,
        load: Load,
        key: Callable[[RouteRequest], bytes],
        instead: Instead,
        *,
        load_factor: float = LOAD_FACTOR,
        slack_tokens: float = SLACK_TOKENS,
    ) -> None:
        if load_factor < 1 or slack_tokens < 0:
            raise ValueError("with a load factor below 1 or a negative slack, all instances might be excluded")
        self._rng = rng
        self._load = load
        self._key = key
        self._instead = instead
        self._factor = load_factor
        self._slack = slack_tokens
        self._rendezvous = Rendezvous()

    def choose(self, request: RouteRequest, members: Sequence[Member], cached: Cached, now_s: float) -> PolicyChoice:
        loads = [self._load(m, 0) for m in members]
        key = self._key(request)
        if not key:
            return PolicyChoice(members[lowest(loads, self._rng)], "least load: no key")
        scores = self._rendezvous.scores(key, members)
        first = scores.index(max(scores))
        # rounding may make the mean smaller than every load
        bound = max(self._factor * sum(loads) / len(loads) + self._slack, min(loads))
        if loads[first] <= bound:
            return PolicyChoice(members[first], "its key")
        if self._instead == "next":
            other = max((i for i, load in enumerate(loads) if load <= bound), key=scores.__getitem__)
        else:
            other = lowest(loads, self._rng)
        return PolicyChoice(members[other], f"{members[first].instance_id} is too full for its key")


IDLE_S: Final = 1800.0  # then a session expires
SESSIONS: Final = 100_000
SPILL: Final = 2.0  # times the mean load, plus `SPILL_TOKENS`: above it a session moves
SPILL_TOKENS: Final = 8192


class SessionAffinity:
    """Sends a session to one instance. `inner` chooses for new ones, and if the instance has left or is too full.

    Unlike with hashing, no session moves when an instance joins.
    """

    def __init__(self, inner: Policy, load: Load, *, idle_s: float = IDLE_S, sessions: float = SESSIONS) -> None:
        self._inner = inner
        self._load = load
        self._idle_s = idle_s
        self._limit = sessions
        # (instance id, last request's time), oldest first
        self._sessions: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def choose(self, request: RouteRequest, members: Sequence[Member], cached: Cached, now_s: float) -> PolicyChoice:
        if not request.session:
            return self._inner.choose(request, members, cached, now_s)
        self._forget(now_s)
        choice = self._stay(request.session, members) or self._inner.choose(request, members, cached, now_s)
        if not request.dry:
            self._sessions[request.session] = (choice.member.instance_id, now_s)
            self._sessions.move_to_end(request.session)
        return choice

    def _stay(self, session: str, members: Sequence[Member]) -> PolicyChoice | None:
        instance_id, _ = self._sessions.get(session, ("", 0.0))
        at = bisect_left(members, instance_id, key=BY_ID)
        if not instance_id or at == len(members) or members[at].instance_id != instance_id:
            return None
        member = members[at]
        mean = sum(self._load(m, 0) for m in members) / len(members)
        if self._load(member, 0) > SPILL * mean + SPILL_TOKENS:
            return None
        return PolicyChoice(member, "the instance of its session")

    def _forget(self, now_s: float) -> None:
        while self._sessions:
            session, (_, last_s) = next(iter(self._sessions.items()))
            if now_s - last_s <= self._idle_s and len(self._sessions) <= self._limit:
                return
            del self._sessions[session]
