"""The instances that a router queries about a prompt, in a large fleet. No I/O.

All routers query the same instances about a common prefix: those with the highest rendezvous scores for its block hashes. A
popular prefix gets more instances, in rounds.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import nlargest
from random import Random
from typing import Final, NamedTuple

from components.routing.affinity import Rendezvous
from components.routing.policy import HasInstanceId, Member, RouteRequest
from components.routing.router import RouteChoice, Router

FIRST_DEPTH_TOKENS: Final = 512
DEPTH_GROWTH: Final = 1.5  # two prompts share a depth of two thirds of their common prefix, or more
MAX_DEPTHS: Final = 12
CANDIDATES_PER_LATER_ROUND: Final = 6  # from all depths
MAX_REMEMBERED_KEYS: Final = 4096
MIN_BURST: Final = 32.0
BURST_S: Final = 20.0  # the token bucket's capacity, in seconds of its rate
MIN_QUERIES_PER_ROUND: Final = 2
MAX_SHARE_PER_ROUND: Final = 0.1  # of the allowance


class Round(NamedTuple):
    ranks: int  # queried at each depth, up to this one
    queued_tokens: int  # the round is needed if the best answer's queue is at least this


# Each candidate computes the prefix once, so only longer queues add more.
ROUNDS: Final = (Round(1, 0), Round(3, 512), Round(8, 512), Round(24, 8192), Round(72, 32_768))


def depths(num_blocks: int, page_size: int) -> list[int]:
    """Prefix lengths in blocks, ascending. A short prompt has one: all its blocks."""
    found: list[int] = []
    tokens = float(FIRST_DEPTH_TOKENS)
    while len(found) < MAX_DEPTHS and (depth := max(1, round(tokens / page_size))) < num_blocks:
        if not found or depth > found[-1]:
            found.append(depth)
        tokens *= DEPTH_GROWTH
    return found or [num_blocks][:num_blocks]


class Allowance:
    """A token bucket that limits queries."""

    def __init__(self) -> None:
        self._left = MIN_BURST
        self._at_s = -math.inf

    def reserve(self, wanted: int, per_s: float, now_s: float) -> int:
        """Take up to `wanted` queries. A busy router gets a few per prompt, rather than none for some."""
        most = max(MIN_BURST, BURST_S * per_s)
        self._left = min(most, self._left + per_s * min(now_s - self._at_s, BURST_S))
        self._at_s = now_s
        taken = min(wanted, int(self._left), max(MIN_QUERIES_PER_ROUND, int(self._left * MAX_SHARE_PER_ROUND)))
        self._left -= taken
        return taken


class CandidateChoice:
    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._rendezvous = Rendezvous()
        self._members: Sequence[HasInstanceId] = ()  # of the last prompt
        self._best: OrderedDict[bytes, list[int]] = OrderedDict()  # ranked indices by key

    def rounds(self, keys: Sequence[bytes], members: Sequence[HasInstanceId]) -> Iterator[Sequence[int]]:
        """Indices of new candidates, round by round. Pass another `members` object if the members change.

        `keys`: the prompt's hashes at its `depths`.
        """
        if members is not self._members:
            self._members = members
            self._best.clear()
        best = [self._best_of(key) for key in reversed(keys)]
        seen: set[int] = set()
        asked_ranks = 0
        for at_round in ROUNDS:
            low, asked_ranks = asked_ranks, at_round.ranks
            new = list(dict.fromkeys(at for ranked in best for at in ranked[low:asked_ranks] if at not in seen))
            if low and len(new) > CANDIDATES_PER_LATER_ROUND:
                new = self._rng.sample(new, CANDIDATES_PER_LATER_ROUND)
            seen.update(new)
            if new:
                yield new

    def _best_of(self, key: bytes) -> list[int]:
        best = self._best.get(key)
        if best is None:
            scores = self._rendezvous.scores(key, self._members)
            best = self._best[key] = nlargest(ROUNDS[-1].ranks, range(len(scores)), key=scores.__getitem__)
            if len(self._best) > MAX_REMEMBERED_KEYS:
                self._best.popitem(last=False)
        else:
            self._best.move_to_end(key)
        return best


class CandidateQuery:
    def __init__(self, router: Router, request: RouteRequest) -> None:
        self._router = router
        self._request = request
        self._answered: dict[str, Member] = {}
        self._unanswered: set[str] = set()
        self._cached: dict[str, int] = {}
        self.num_asked = 0
        self._rounds = 0

    @property
    def answered(self) -> Sequence[str]:
        return sorted(self._answered)

    def add_answers(self, asked: int, cached: Mapping[str, int]) -> None:
        """`cached`: prompt tokens by instance that answered."""
        self.num_asked += asked
        self._rounds += 1
        self._cached.update(cached)
        for instance_id in cached:
            if (member := self._router.book.find(instance_id)) is not None:
                self._answered[instance_id] = member

    def add_fallbacks(self, instance_ids: Iterable[str]) -> None:
        """Instances that are chosen only if no queried one answers."""
        self._unanswered.update(instance_ids)

    @property
    def is_enough(self) -> bool:
        chosen = self._chosen(replace(self._request, dry=True, explain=False))
        member = None if chosen is None else self._answered.get(chosen.instance_id)
        if member is None:
            return False
        return self._rounds >= len(ROUNDS) or member.queued_tokens < ROUNDS[self._rounds].queued_tokens

    def choose(self) -> RouteChoice | None:
        return self._chosen(self._request)

    def _chosen(self, request: RouteRequest) -> RouteChoice | None:
        book = self._router.book
        ids = self.answered or sorted(self._unanswered)
        usable = [member for instance_id in ids if (member := book.find(instance_id)) is not None]
        return self._router.choose(request, _no_blocks, usable, self._cached)


def _no_blocks(_page_size: int) -> Sequence[bytes]:
    return ()
