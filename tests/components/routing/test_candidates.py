"""The instances that are queried for a prompt, their order, and the limit of queries."""

from random import Random

import pytest

from components.routing.candidates import (
    BURST_S,
    CANDIDATES_PER_LATER_ROUND,
    MIN_BURST,
    ROUNDS,
    Allowance,
    CandidateChoice,
    CandidateQuery,
    depths,
)
from components.routing.policies import parse_policy
from components.routing.policy import Member, RouteRequest
from components.routing.router import Router
from components.wire.heartbeat import Heartbeat

FLEET = [Member(f"p{number:03}") for number in range(200)]


def rounds(keys: list[bytes], members: list[Member] = FLEET, seed: int = 0) -> list[list[str]]:
    found = CandidateChoice(Random(seed)).rounds(keys, members)
    return [[members[at].instance_id for at in candidates] for candidates in found]


def test_depths_grow_by_half_and_end_before_the_prompt_does() -> None:
    assert depths(200, 16) == [32, 48, 72, 108, 162]
    assert depths(162, 16) == [32, 48, 72, 108]
    assert depths(10_000, 16)[-1] == 2768
    assert depths(40, 64) == [8, 12, 18, 27]


@pytest.mark.parametrize(("num_blocks", "found"), [(0, []), (1, [1]), (20, [20]), (32, [32]), (33, [32])])
def test_a_short_prompt_has_one_depth(num_blocks: int, found: list[int]) -> None:
    assert depths(num_blocks, 16) == found


def test_pages_larger_than_the_first_depth_are_depths_each_once() -> None:
    assert depths(6, 1024) == [1, 2, 3, 4]


def test_prompts_with_a_common_prefix_ask_the_same_instances_from_every_router() -> None:
    common = [b"a", b"b", b"c"]
    one, other = rounds([*common, b"x"], seed=1), rounds([*common, b"y"], seed=2)
    assert set(one[0][1:]) == set(other[0][1:])
    assert one[0][1:] == [rounds([key])[0][0] for key in reversed(common)]


def test_the_candidates_of_the_longest_prefix_come_first() -> None:
    assert rounds([b"a", b"b"])[0] == [*rounds([b"b"])[0], *rounds([b"a"])[0]]


def test_an_instance_that_leaves_moves_its_own_keys_alone() -> None:
    keys = [str(number).encode() for number in range(500)]
    gone = rounds(keys[:1])[0][0]
    left = [member for member in FLEET if member.instance_id != gone]
    for key in keys:
        before, after = rounds([key])[0][0], rounds([key], left)[0][0]
        assert before in {after, gone}


def test_no_instance_is_asked_twice_and_a_small_fleet_is_asked_whole() -> None:
    small = FLEET[:5]
    asked = [name for each in rounds([b"a", b"b", b"c"], small) for name in each]
    assert len(asked) == len(set(asked))
    assert {name for each in rounds([b"a"], small) for name in each} == {member.instance_id for member in small}


def test_later_rounds_draw_a_few_of_many() -> None:
    keys = [str(number).encode() for number in range(8)]
    first, *later = rounds(keys)
    assert len(first) == 8
    assert len(later) == len(ROUNDS) - 1
    assert all(len(each) == CANDIDATES_PER_LATER_ROUND for each in later)


def test_rankings_are_made_anew_when_the_fleet_changes() -> None:
    choice = CandidateChoice(Random(0))
    (first,) = next(choice.rounds([b"a"], FLEET))
    left = [member for at, member in enumerate(FLEET) if at != first]
    (second,) = next(choice.rounds([b"a"], left))
    assert left[second] is not FLEET[first]
    assert next(choice.rounds([b"a"], FLEET)) == [first]


def test_an_empty_fleet_has_no_candidates() -> None:
    assert rounds([b"a"], []) == []


def take_all(allowance: Allowance, per_s: float, now_s: float) -> int:
    """Reserve as much as possible at once."""
    taken = 0
    while got := allowance.reserve(1000, per_s, now_s):
        taken += got
    return taken


def test_an_allowance_refills_at_its_rate_and_holds_a_burst() -> None:
    allowance = Allowance()
    assert take_all(allowance, 10.0, 0.0) == BURST_S * 10
    assert allowance.reserve(5, 10.0, 0.0) == 0
    assert take_all(allowance, 10.0, 1.0) == 10
    assert allowance.reserve(7, 10.0, 1000.0) == 7
    assert take_all(allowance, 10.0, 1000.0) == BURST_S * 10 - 7


def test_an_allowance_is_never_exceeded() -> None:
    """Queries are at most a burst plus rate times time."""
    draw, allowance = Random(3), Allowance()
    taken, now_s = 0, 0.0
    for _ in range(5000):
        now_s += draw.expovariate(3.0)
        taken += allowance.reserve(draw.randrange(1, 30), 12.0, now_s)
        assert taken <= max(MIN_BURST, BURST_S * 12.0) + 12.0 * now_s + 1


def test_the_less_is_left_the_fewer_are_asked_at_once() -> None:
    allowance = Allowance()
    taken = [allowance.reserve(100, 50.0, 0.0) for _ in range(200)]
    assert taken[0] == 100
    assert taken == sorted(taken, reverse=True)
    assert {2, 0} <= set(taken)


def test_a_small_rate_still_allows_a_first_prompt() -> None:
    assert take_all(Allowance(), 0.0, 0.0) == MIN_BURST


class Scene:
    def __init__(self) -> None:
        self.router = Router(
            parse_policy("kv_aware").make("prefill", Random(0)), Random(0), lambda: 0.0, None, or_none=True
        )
        for member in FLEET[:20]:
            self.router.joined(member.instance_id, "e1")
        self.query = CandidateQuery(self.router, RouteRequest(2000))

    def queue(self, name: str, tokens: int) -> None:
        self.router.record_heartbeat(Heartbeat(instance_id=name, epoch="e1", step=1, busy=True, queued_tokens=tokens))


def test_an_instance_that_can_begin_at_once_is_enough() -> None:
    scene = Scene()
    assert not scene.query.is_enough, "nobody has answered"
    scene.queue("p001", 5000)
    scene.query.add_answers(3, {"p001": 0})
    assert not scene.query.is_enough
    scene.query.add_answers(2, {"p002": 0, "p003": 1024})
    assert scene.query.is_enough
    chosen = scene.query.choose()
    assert chosen is not None
    assert (chosen.instance_id, chosen.cached_tokens, chosen.num_candidates) == ("p003", 1024, 3)
    assert scene.query.num_asked == 5
    assert scene.query.answered == ["p001", "p002", "p003"]


def test_each_round_needs_a_longer_queue_than_the_one_before() -> None:
    """A short queue is no reason to compute a prefix on another instance."""
    scene = Scene()
    scene.queue("p001", 4000)
    enough = []
    for _ in ROUNDS:
        scene.query.add_answers(1, {"p001": 0})
        enough.append(scene.query.is_enough)
    assert enough == sorted(enough)
    assert not enough[0]
    assert enough[-1]


def test_an_instance_that_has_left_meanwhile_is_not_chosen() -> None:
    scene = Scene()
    scene.query.add_answers(2, {"p001": 2000, "p002": 0})
    scene.router.left("p001")
    chosen = scene.query.choose()
    assert chosen is not None
    assert chosen.instance_id == "p002"


def test_none_is_chosen_without_answers() -> None:
    scene = Scene()
    scene.query.add_answers(4, {})
    assert scene.query.choose() is None


def test_without_a_question_the_candidates_are_chosen_by_what_is_known() -> None:
    scene = Scene()
    scene.queue("p003", 9000)
    scene.query.add_fallbacks(["p003", "p004"])
    chosen = scene.query.choose()
    assert chosen is not None
    assert chosen.instance_id == "p004"
