"""The load book, compared with a complete model of requests, workers and heartbeats on their way."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from components.routing.cache_policies import KvWeights
from components.routing.load_book import OWN_REQUEST_EXPIRY_S, UNREPORTED_EXPIRY_S, LoadBook, RoutedRequest
from components.routing.policies import DEFAULT, WorkerRole, parse_policy
from components.routing.policy import RouteRequest
from components.wire.heartbeat import Heartbeat

IDS = st.sampled_from("ab")


def beat(instance_id: str = "a", epoch: str = "1", *, step: int = 0, accepted: int = 0, **counts: int) -> Heartbeat:
    return Heartbeat(instance_id=instance_id, epoch=epoch, step=step, busy=True, accepted=accepted, **counts)


@dataclass(eq=False)
class Request:
    tokens: int
    pages: int
    branches: int
    worker: "Worker"
    number: int | None = None
    sent: RoutedRequest | None = None  # None: another router's
    sent_s: float = 0.0
    answered: bool = False
    given_up: bool = False  # the book knows that it has ended
    computed: bool = False  # the book knows that its prompt is computed


@dataclass(eq=False)
class Worker:
    instance_id: str
    epoch: str
    accepted: int = 0
    step: int = 0
    active: list[Request] = field(default_factory=list)
    ours: list[Request] = field(default_factory=list)
    believed: Heartbeat | None = None
    told_of: int = -1  # the greatest `accepted` of a received heartbeat

    def beat(self) -> Heartbeat:
        return beat(
            self.instance_id,
            self.epoch,
            step=self.step,
            accepted=self.accepted,
            num_requests=sum(r.branches for r in self.active),
            queued_tokens=sum(r.tokens for r in self.active),
            held_pages=sum(r.pages for r in self.active),
        )


class BookAgainstWorld(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.book = LoadBook()
        self.now = 0.0
        self.workers: dict[str, Worker] = {}
        self.beats: list[tuple[float, Heartbeat]] = []
        self.flying: list[Request] = []  # sent, not arrived
        self.unanswered: list[Request] = []  # arrived
        self.epochs = 0

    @initialize()
    def all_start(self) -> None:
        for instance_id in "ab":
            self.starts_or_restarts(instance_id)

    @rule(instance_id=IDS)
    def starts_or_restarts(self, instance_id: str) -> None:
        self.epochs += 1
        self.workers[instance_id] = Worker(instance_id, str(self.epochs))
        self.book.joined(instance_id, str(self.epochs))

    @rule(instance_id=IDS)
    def leaves(self, instance_id: str) -> None:
        self.workers.pop(instance_id, None)
        self.book.left(instance_id)
        assert self.book.find(instance_id) is None

    @rule(instance_id=IDS, tokens=st.integers(0, 50), pages=st.integers(0, 9), branches=st.integers(1, 3))
    def sends(self, instance_id: str, tokens: int, pages: int, branches: int) -> None:
        sent = self.book.send(instance_id, tokens, pages, self.now, branches)
        worker = self.workers.get(instance_id)
        assert (sent is None) == (worker is None)
        if worker is not None:
            request = Request(tokens, pages, branches, worker, sent=sent, sent_s=self.now)
            worker.ours.append(request)
            self.flying.append(request)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), refused=st.booleans())
    def arrives(self, data: st.DataObject, refused: bool) -> None:
        request = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        if refused or self.workers.get(request.worker.instance_id) is not request.worker:
            self.give_up(request)
        else:
            self.accept(request)
            self.unanswered.append(request)

    @precondition(lambda self: self.unanswered)
    @rule(data=st.data(), lost=st.booleans())
    def answer_comes(self, data: st.DataObject, lost: bool) -> None:
        request = self.unanswered.pop(data.draw(st.integers(0, len(self.unanswered) - 1)))
        if lost:
            self.give_up(request)
        else:
            assert request.sent is not None
            assert request.number is not None
            self.book.accepted(request.sent, request.number)
            request.answered = True

    @rule(instance_id=IDS, tokens=st.integers(0, 50), pages=st.integers(0, 9))
    def another_router_sends(self, instance_id: str, tokens: int, pages: int) -> None:
        if (worker := self.workers.get(instance_id)) is not None:
            self.accept(Request(tokens, pages, 2, worker))

    @rule(instance_id=IDS, data=st.data(), told=st.booleans())
    def a_request_ends(self, instance_id: str, data: st.DataObject, told: bool) -> None:
        worker = self.workers.get(instance_id)
        if worker is not None and worker.active:
            request = worker.active.pop(data.draw(st.integers(0, len(worker.active) - 1)))
            worker.step += 1
            if told and request.answered:
                self.give_up(request)

    @rule(instance_id=IDS, data=st.data())
    def a_first_token_comes(self, instance_id: str, data: st.DataObject) -> None:
        """Its worker may still count the prompt as queued."""
        worker = self.workers.get(instance_id)
        if worker is not None and worker.ours:
            request = data.draw(st.sampled_from(worker.ours))
            assert request.sent is not None
            self.book.computed(request.sent)
            request.computed = True

    @rule(instance_id=IDS)
    def says_what_it_carries(self, instance_id: str) -> None:
        if (worker := self.workers.get(instance_id)) is not None:
            self.beats.append((self.now, worker.beat()))

    @precondition(lambda self: self.beats)
    @rule(data=st.data(), lost=st.booleans())
    def heartbeat_comes(self, data: st.DataObject, lost: bool) -> None:
        _, heartbeat = self.beats.pop(data.draw(st.integers(0, len(self.beats) - 1)))
        if not lost:
            self.deliver(heartbeat)

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 5.0, 500.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.beats = [(made_s, b) for made_s, b in self.beats if self.now - made_s < 2]
        self.book.expire(self.now)

    def accept(self, request: Request) -> None:
        worker = request.worker
        worker.accepted += 1
        request.number = worker.accepted
        worker.active.append(request)

    def give_up(self, request: Request) -> None:
        assert request.sent is not None or not request.answered
        if request.sent is not None:
            self.book.ended(request.sent)
            request.given_up = True

    def deliver(self, heartbeat: Heartbeat) -> None:
        self.book.record_heartbeat(heartbeat, self.now)
        worker = self.workers.get(heartbeat.instance_id)
        if worker is None or worker.epoch != heartbeat.epoch:
            return
        known = worker.believed
        if known is None or (heartbeat.accepted, heartbeat.step) >= (known.accepted, known.step):
            worker.believed = heartbeat
            worker.told_of = heartbeat.accepted

    @invariant()
    def book_is_the_heartbeat_and_what_it_could_not_know(self) -> None:
        assert [m.instance_id for m in self.book.members] == sorted(self.workers)
        kept = 0
        for member in self.book.members:
            worker = self.workers[member.instance_id]
            untold = [
                r
                for r in worker.ours
                if not r.given_up
                and self.now - r.sent_s < UNREPORTED_EXPIRY_S
                and not (r.answered and r.number is not None and r.number <= worker.told_of)
            ]
            said = worker.believed or beat()
            ours = [r for r in worker.ours if not r.given_up and self.now - r.sent_s < OWN_REQUEST_EXPIRY_S]
            told = said.num_requests + sum(r.branches for r in untold)
            assert member.running == max(told, sum(r.branches for r in ours))
            queued = said.queued_tokens + sum(r.tokens for r in untold)
            pages = said.held_pages + sum(r.pages for r in untold)
            if told < sum(r.branches for r in ours):  # it lacks some
                queued = max(queued, sum(r.tokens for r in ours if not r.computed))
                pages = max(pages, sum(r.pages for r in ours))
            assert member.queued_tokens == queued
            assert member.used_pages == pages
            assert self.book.find(member.instance_id) is member
            kept += len(untold)
        assert len(self.book._unreported) == kept

    def teardown(self) -> None:
        """After all answers and heartbeats, the book is exact."""
        while self.flying:
            self.give_up(self.flying.pop())
        for request in self.unanswered:
            assert request.sent is not None
            assert request.number is not None
            self.book.accepted(request.sent, request.number)
        for worker in self.workers.values():
            for request in worker.ours:
                if request not in worker.active:
                    self.give_up(request)
            self.deliver(worker.beat())
            member = self.book.find(worker.instance_id)
            assert member is not None
            assert (member.running, member.queued_tokens, member.used_pages) == (
                sum(r.branches for r in worker.active),
                sum(r.tokens for r in worker.active),
                sum(r.pages for r in worker.active),
            )
        assert len(self.book._unreported) == 0


BookAgainstWorld.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestBookAgainstWorld = BookAgainstWorld.TestCase


def test_a_burst_is_seen_before_any_heartbeat() -> None:
    book = LoadBook()
    member = book.joined("a", "1")
    for _ in range(5):
        book.send("a", 100, 7, 0.0)
    assert (member.running, member.queued_tokens, member.used_pages) == (5, 500, 35)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_burst_between_two_heartbeats_does_not_hit_the_instance_that_looked_idle(role: WorkerRole) -> None:
    book, policy = LoadBook(), parse_policy(DEFAULT[role]).make(role, Random(0))
    for instance_id, running in {"a": 20, "b": 20, "c": 20, "idle": 0}.items():
        book.joined(instance_id, "1")
        book.record_heartbeat(
            beat(instance_id, num_requests=running, queued_tokens=320 * running, held_pages=20 * running), 0.0
        )
    for _ in range(100):
        choice = policy.choose(RouteRequest(320), book.members, {}, 0.0)
        book.send(choice.member.instance_id, 320, 20, 0.0)
    assert sorted(m.running for m in book.members) == [40, 40, 40, 40]


@pytest.mark.parametrize(
    ("name", "role", "bound"),
    [
        ("kv_aware", "prefill", lambda fair: 2 * fair + KvWeights().spill_requests + 1),
        ("least_load", "prefill", lambda fair: fair + 1),
        ("least_load", "decode", lambda fair: fair + 1),
    ],
)
def test_a_worker_that_reports_no_load_gets_no_more_than_its_bound(
    name: str, role: WorkerRole, bound: Callable[[float], float]
) -> None:
    """No request ends, and after each one all workers report their load; one of them reports zero each time."""
    book, policy = LoadBook(), parse_policy(name).make(role, Random(0))
    had = {"a": 0, "b": 0, "c": 0, "liar": 0}
    for instance_id in had:
        book.joined(instance_id, "1")
    for step in range(400):
        choice = policy.choose(RouteRequest(320), book.members, {}, 0.0)
        chosen = choice.member.instance_id
        sent = book.send(chosen, 320 if role == "prefill" else 0, 20, 0.0)
        assert sent is not None
        had[chosen] += 1
        book.accepted(sent, had[chosen])
        for instance_id, requests in had.items():
            says = 0 if instance_id == "liar" else requests
            load = {"queued_tokens": 320 * says} if role == "prefill" else {"held_pages": 20 * says}
            book.record_heartbeat(beat(instance_id, step=step, accepted=requests, num_requests=says, **load), 0.0)
        assert had["liar"] <= bound((step + 1) / 4)


def test_a_heartbeat_that_overtakes_the_answer_covers_the_request() -> None:
    book = LoadBook()
    member = book.joined("a", "1")
    sent = book.send("a", 100, 7, 0.0)
    assert sent is not None
    book.record_heartbeat(beat(accepted=1, num_requests=1), 0.0)
    book.accepted(sent, 1)
    assert (member.running, len(book._unreported)) == (1, 0)


@pytest.mark.parametrize("speed", [float("nan"), float("inf"), -1.0])
def test_a_speed_that_is_no_number_counts_as_unknown(speed: float) -> None:
    """With NaN `kv_aware` found no instance, and every longer prompt failed."""
    book = LoadBook()
    member = book.joined("a", "1")
    book.record_heartbeat(replace(beat(), prompt_tokens_per_s=speed), 0.0)
    assert member.prompt_tokens_per_s == 0.0


def test_a_heartbeat_of_another_epoch_is_ignored() -> None:
    book = LoadBook()
    member = book.joined("a", "2")
    book.record_heartbeat(beat(epoch="1", num_requests=5), 0.0)
    book.record_heartbeat(beat("b", epoch="2", num_requests=5), 0.0)
    assert (member.running, book.find("b")) == (0, None)


def test_requests_of_a_worker_that_never_reports_them_are_forgotten() -> None:
    book = LoadBook()
    member = book.joined("a", "1")
    sent = book.send("a", 100, 7, 0.0)
    assert sent is not None
    book.accepted(sent, 1)
    for tenth in range(1, int(UNREPORTED_EXPIRY_S * 10)):
        book.record_heartbeat(beat(step=tenth), tenth / 10)
        assert member.running == 1
    book.record_heartbeat(beat(step=10_000), UNREPORTED_EXPIRY_S)
    assert len(book._unreported) == 0
    # For all we know it is there.
    assert (member.running, member.queued_tokens, member.used_pages) == (1, 100, 7)
    book.computed(sent)
    assert (member.running, member.queued_tokens, member.used_pages) == (1, 0, 7)
    book.expire(OWN_REQUEST_EXPIRY_S)
    assert (member.running, member.queued_tokens, member.used_pages) == (0, 0, 0)


def test_a_lost_instance_takes_its_requests_along_and_their_late_ends_change_nothing() -> None:
    book = LoadBook()
    book.joined("a", "1")
    sent = book.send("a", 100, 7, 0.0)
    assert sent is not None
    member = book.joined("a", "2")
    assert (member.running, len(book._unreported)) == (0, 0)
    book.accepted(sent, 1)
    book.ended(sent)
    assert (member.running, member.queued_tokens, member.used_pages) == (0, 0, 0)


def test_the_next_heartbeat_of_a_worker_without_numbers_covers_its_requests() -> None:
    book = LoadBook()
    member = book.joined("a", "1")
    sent = book.send("a", 100, 7, 0.0)
    assert sent is not None
    book.record_heartbeat(beat(step=1, num_running=3, num_waiting=1, num_reserved=2), 0.0)
    assert member.running == 7
    book.accepted(sent, 0)
    assert member.running == 7
    book.record_heartbeat(beat(step=2, num_running=4), 0.5)
    assert (member.running, member.queued_tokens) == (4, 0)


def test_one_that_boasted_is_believed_again_after_a_while() -> None:
    book = LoadBook()
    member = book.joined("a", "1")
    book.record_heartbeat(beat(step=1, accepted=2**60, num_requests=9), 0.0)
    book.record_heartbeat(beat(step=2, accepted=5, num_requests=1), 0.5)
    assert member.running == 9
    book.record_heartbeat(beat(step=3, accepted=6, num_requests=2), 2.0)
    assert member.running == 2


@pytest.mark.parametrize("field_name", ["num_requests", "queued_tokens", "held_pages", "total_pages"])
def test_loads_are_never_negative(field_name: str) -> None:
    book = LoadBook()
    member = book.joined("a", "1")
    book.record_heartbeat(replace(beat(), **{field_name: -5}), 0.0)
    assert min(member.running, member.queued_tokens, member.used_pages, member.total_pages) == 0
