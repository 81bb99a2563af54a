"""The parts of a router together: a choice, its effects, and its outcome."""

import json
from random import Random

import pytest

from components.errors import (
    DecodeLost,
    InvariantBroken,
    MalformedMessage,
    MeshError,
    Overloaded,
    PeerBroken,
    StaleInstance,
)
from components.routing.cache_policies import KvWeights
from components.routing.health import DEFAULT_SETTINGS, WARM_S, BreakerState
from components.routing.kv_index import KvIndex
from components.routing.policies import PolicyName, parse_policy
from components.routing.policy import Member, RouteRequest
from components.routing.router import Route, RouteChoice, Router
from components.wire.heartbeat import Heartbeat
from components.wire.tokens import PromptBlocks, block_hashes, pack_tokens, seed_hash

SEED = seed_hash("m")
PROMPT = list(range(64))


def blocks(tokens: list[int] = PROMPT) -> PromptBlocks:
    return PromptBlocks(pack_tokens(tokens), SEED)


class Fleet:
    """Long-known instances, with a clock that the test moves."""

    def __init__(self, policy: PolicyName = "kv_aware", sizes: dict[str, int] | None = None, tell: str = "abc") -> None:
        self.now = 0.0
        self.index = KvIndex()
        self.router = Router(parse_policy(policy).make("prefill", Random(1)), Random(1), lambda: self.now, self.index)
        for name, size in (sizes or dict.fromkeys("abc", 16)).items():
            self.router.joined(name, "e", size, kv_events=name in tell)
        self.now = WARM_S

    def choose(self, usable: str = "abc", *, explain: bool = False, tokens: list[int] = PROMPT) -> RouteChoice:
        chosen = self.router.choose(
            RouteRequest(len(tokens), explain=explain), blocks(tokens), [Member(name) for name in usable]
        )
        assert chosen is not None
        return chosen

    def send(self, chosen: RouteChoice, tokens: int = 64) -> Route:
        return self.router.send(chosen, tokens, pages=4)

    def beat(self, name: str, **said: int) -> None:
        self.router.record_heartbeat(Heartbeat(instance_id=name, epoch="e", step=1, busy=True, **said))


def test_kv_events_of_an_instance_attract_the_prompt() -> None:
    fleet = Fleet()
    fleet.index.add("b", block_hashes(PROMPT, 16, SEED)[:2])
    chosen = fleet.choose()
    assert (chosen.instance_id, chosen.cached_tokens, chosen.num_candidates) == ("b", 32, 3)


def test_a_single_instance_is_chosen_for_that_alone() -> None:
    """Its cache is not looked up, but the reason said that none of the prompt was cached."""
    fleet = Fleet()
    fleet.index.add("b", block_hashes(PROMPT, 16, SEED)[:2])
    assert fleet.choose("b").why == "the only instance"
    assert "32 of 64 tokens cached" in fleet.choose("b", explain=True).why


def test_with_pages_of_several_sizes_each_is_looked_up_by_its_own() -> None:
    fleet = Fleet(sizes={"a": 16, "b": 32, "c": 32})
    fleet.index.add("a", block_hashes(PROMPT, 16, SEED)[:1])
    fleet.index.add("c", block_hashes(PROMPT, 32, SEED)[:1])
    assert (fleet.choose().instance_id, fleet.choose().cached_tokens) == ("c", 32)
    fleet.router.left("c")
    assert fleet.choose("ab").cached_tokens == 16


def test_an_instance_never_has_the_whole_prompt() -> None:
    """The last token is always computed, to draw the next one."""
    fleet = Fleet()
    fleet.index.add("b", block_hashes(PROMPT, 16, SEED))
    assert fleet.choose().cached_tokens == 63


def test_caches_of_instances_without_kv_events_are_guessed_from_requests() -> None:
    fleet = Fleet(tell="bc")
    fleet.send(fleet.choose("a")).ended()
    fleet.send(fleet.choose("b", tokens=PROMPT[::-1])).ended()
    assert (fleet.choose().instance_id, fleet.choose().cached_tokens) == ("a", 63)
    assert fleet.choose(tokens=PROMPT[::-1]).cached_tokens == 0, "b would have told"
    fleet.router.joined("a", "anew", 16)
    assert fleet.choose().cached_tokens == 0


def test_requests_count_from_sending_on_and_until_they_are_over() -> None:
    fleet = Fleet("least_load")
    routes = [fleet.send(fleet.choose()) for _ in range(6)]
    assert sorted(route.instance_id for route in routes) == list("aabbcc"), "a burst is spread before any heartbeat"
    member = fleet.router.book.find("a")
    assert member is not None
    assert (member.running, member.queued_tokens, member.used_pages) == (2, 128, 8)
    for route in routes:
        route.ended()
    assert (member.running, member.queued_tokens, member.used_pages) == (0, 0, 0)


def test_a_request_of_several_branches_is_over_with_the_last_of_them() -> None:
    fleet = Fleet("least_load")
    route = fleet.router.send(fleet.choose("a"), 64, 4, branches=3)
    member = fleet.router.book.find("a")
    assert member is not None
    for _ in range(2):
        route.ended()
        assert member.running == 3
    route.ended()
    assert member.running == 0


def test_a_request_that_a_heartbeat_covers_is_not_counted_twice() -> None:
    fleet = Fleet("least_load")
    route = fleet.send(fleet.choose("a"))
    route.accepted(1)
    fleet.beat("a", accepted=1, num_requests=1, queued_tokens=64, held_pages=4)
    member = fleet.router.book.find("a")
    assert member is not None
    assert (member.running, member.queued_tokens, member.used_pages) == (1, 64, 4)


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (DecodeLost("silent"), BreakerState.OPEN),
        (PeerBroken("its steps fail"), BreakerState.OPEN),
        (MalformedMessage("unknown message tag"), BreakerState.OPEN),
        (InvariantBroken("a defect of this process"), BreakerState.CLOSED),
        (Overloaded("full"), BreakerState.CLOSED),
        (StaleInstance("it is another one now"), BreakerState.CLOSED),
    ],
)
def test_loss_speaks_against_an_instance_and_a_refusal_does_not(error: MeshError, state: BreakerState) -> None:
    fleet = Fleet("round_robin")
    for _ in range(DEFAULT_SETTINGS.failures):
        route = fleet.send(fleet.choose("b"))
        route.failed(error)
        route.ended()
    assert fleet.router.health.state("b") is state
    seen = {fleet.choose().instance_id for _ in range(4)}
    assert seen == ({"a", "c"} if state is BreakerState.OPEN else {"a"}) or state is BreakerState.CLOSED


def test_branches_that_fail_together_are_one_failure() -> None:
    fleet = Fleet("round_robin")
    route = fleet.router.send(fleet.choose("b"), 64, 4, branches=4)
    for _ in range(4):
        route.failed(DecodeLost("a frame was lost"))
        route.ended()
    assert fleet.router.health.state("b") is BreakerState.CLOSED


def test_success_makes_up_for_failures() -> None:
    fleet = Fleet("round_robin")
    for outcome in ("fail", "fail", "succeed", "fail", "fail"):
        route = fleet.send(fleet.choose("b"))
        route.failed(DecodeLost("")) if outcome == "fail" else route.succeeded()
        route.ended()
    assert fleet.router.health.state("b") is BreakerState.CLOSED


@pytest.mark.parametrize("outcome", ["fail", "succeed"])
def test_requests_to_an_earlier_process_do_not_count_for_the_one_with_its_id(outcome: str) -> None:
    """Requests lost in a restart opened the breaker of the next process."""
    fleet = Fleet("round_robin")
    before = [fleet.send(fleet.choose("b")) for _ in range(DEFAULT_SETTINGS.failures)]
    fleet.router.joined("b", "anew", 16)
    if outcome == "succeed":
        for _ in range(DEFAULT_SETTINGS.failures):
            fleet.send(fleet.choose("b")).failed(DecodeLost("silent"))
        fleet.now += 2 * DEFAULT_SETTINGS.first_backoff_s
        fleet.send(fleet.choose("b"))  # on trial
    state = fleet.router.health.state("b")
    for route in before:
        route.failed(DecodeLost("its lease has expired")) if outcome == "fail" else route.succeeded()
        route.ended()
    assert fleet.router.health.state("b") is state
    assert state is (BreakerState.CLOSED if outcome == "fail" else BreakerState.HALF_OPEN)


def test_an_explanation_names_the_candidates_and_leaves_no_trace() -> None:
    fleet = Fleet("kv_aware")
    fleet.index.add("b", block_hashes(PROMPT, 16, SEED)[:2])
    fleet.beat("c", queued_tokens=1000)
    explained = fleet.router.explain(RouteRequest(64), blocks(), [Member(name) for name in "abc"])
    assert explained is not None
    twice = 1 + 1000 / 3 / KvWeights().crowd_tokens  # the weight of an uncached token
    assert [(c.instance_id, c.cached_tokens, c.queued_tokens, c.cost) for c in explained.candidates] == [
        ("b", 32, 0, 32 * twice),
        ("a", 0, 0, 64 * twice),
        ("c", 0, 1000, 500 + 64 * twice),
    ]
    facts = explained.facts()
    assert json.loads(str(facts["kvmesh.route.compared"]))[0] == {
        "instance": "b",
        "cached": 32,
        "queued": 0,
        "running": 0,
        "pages": 0,
        "cost": 33,
    }
    assert "32 of 64 tokens cached" in str(facts["kvmesh.route.why"])
    assert all(member.running == 0 for member in fleet.router.book.members)


@pytest.mark.parametrize(
    ("policy", "why"),
    [("round_robin", "its turn"), ("session_affinity", "cost 64"), ("bucket", "too few prompts so far")],
)
def test_a_policy_with_a_memory_forgets_what_was_only_a_question(policy: PolicyName, why: str) -> None:
    fleet = Fleet(policy)
    members = [Member(name) for name in "abc"]
    for _ in range(200):
        fleet.router.explain(RouteRequest(64, session="s"), blocks(), members)
    chosen = fleet.router.choose(RouteRequest(64, session="s"), blocks(), members)
    assert chosen is not None
    assert why in chosen.why
    assert policy != "round_robin" or chosen.instance_id == "a"


def test_an_instance_that_left_is_not_chosen_from_the_same_sequence() -> None:
    fleet = Fleet("round_robin")
    usable = [Member(name) for name in "abc"]

    def one() -> str:
        chosen = fleet.router.choose(RouteRequest(1), blocks(), usable)
        assert chosen is not None
        return chosen.instance_id

    assert [one() for _ in range(3)] == list("abc")
    fleet.router.left("b")
    assert [one() for _ in range(4)] == list("acac")
    fleet.router.joined("b", "anew", 16)
    assert "b" in {one() for _ in range(30)}


def test_without_usable_instances_none_is_chosen() -> None:
    assert Fleet().router.choose(RouteRequest(1), blocks(), []) is None
