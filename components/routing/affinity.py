"""Session affinity: a session's requests stay with the instance that another policy chose first."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Final

from components.routing.choice import Ask, Choice, Member, Policy
from components.routing.load import Load

IDLE_S: Final = 1800.0  # then a session without requests is forgotten
SESSIONS: Final = 100_000
SPILL: Final = 2.0
SPILL_TOKENS: Final = 8192
_id = attrgetter("instance_id")


class SessionAffinity:
    """Wraps another policy, which chooses for a session's first request and when its instance is gone or too full.

    Too full: a load above `spill` times the mean and `spill_tokens`. Unlike with hashing, a new instance moves no
    session; but routers do not share sessions.
    """

    def __init__(
        self,
        inner: Policy,
        load: Load,
        *,
        idle_s: float = IDLE_S,
        sessions: float = SESSIONS,
        spill: float = SPILL,
        spill_tokens: float = SPILL_TOKENS,
    ) -> None:
        self._inner = inner
        self._load = load
        self._idle_s = idle_s
        self._limit = sessions
        self._spill = spill
        self._spill_tokens = spill_tokens
        # → (instance id, time of the last request), oldest first
        self._sessions: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def choose(self, ask: Ask, members: Sequence[Member], cached: Mapping[str, int], now_s: float) -> Choice | None:
        if not ask.session:
            return self._inner.choose(ask, members, cached, now_s)
        self._forget(now_s)
        choice = self._stay(ask.session, members) or self._inner.choose(ask, members, cached, now_s)
        if choice is not None and not ask.dry:
            self._sessions[ask.session] = (choice.member.instance_id, now_s)
            self._sessions.move_to_end(ask.session)
        return choice

    def _stay(self, session: str, members: Sequence[Member]) -> Choice | None:
        instance_id, _ = self._sessions.get(session, ("", 0.0))
        at = bisect_left(members, instance_id, key=_id)
        if not instance_id or at == len(members) or members[at].instance_id != instance_id:
            return None
        member = members[at]
        mean = sum(self._load(m, 0) for m in members) / len(members)
        if self._load(member, 0) > self._spill * mean + self._spill_tokens:
            return None
        return Choice(member, "its session is there")

    def _forget(self, now_s: float) -> None:
        while self._sessions:
            session, (_, last_s) = next(iter(self._sessions.items()))
            if now_s - last_s <= self._idle_s and len(self._sessions) <= self._limit:
                return
            del self._sessions[session]
