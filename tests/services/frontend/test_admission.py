"""Which requests are admitted at once, which wait, and which are refused, by a clock that jumps."""

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from types import SimpleNamespace
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from components.errors import NoDecodeInstance, Overloaded, QueueFull
from components.routing.policy import REQUEST_TOKENS
from services.frontend.admission import CHECK_INTERVAL_S, Admission, queue_key
from services.frontend.fair_queue import AdmissionTicket
from services.frontend.gate import read_credentials
from services.frontend.metrics import FrontendMetrics
from services.frontend.ports import FleetRoom
from tests.faults.virtual_loop import run_virtually

UNKNOWN: Final = FleetRoom(0, None, 0)
FULL: Final = FleetRoom(1500, 1000, 0)
EMPTY: Final = FleetRoom(0, 1000, 0)


class Case:
    """Admission to a fleet of 1,000 tokens with a limit of 1.5 times that, and the requests that came to it."""

    def __init__(self, room: FleetRoom = EMPTY, **limits: Any) -> None:
        self.room_now = room
        self.metrics = FrontendMetrics(CollectorRegistry())
        wanted = {"queue_tokens": 10_000, "queue_timeout_s": 5.0, "admit_load": 1.5, "max_inflight": None, **limits}
        self.models = ["m"]
        mesh = SimpleNamespace(room=lambda: self.room_now, models=lambda: self.models)
        self.admission = Admission(mesh, SimpleNamespace(**wanted), self.metrics)
        self.admitted: list[str] = []
        self.refused: dict[str, Overloaded] = {}
        self.tickets: dict[str, AdmissionTicket] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def come(self, name: str, tokens: int = 100, key: bytes = b"", priority: int = 0) -> AdmissionTicket:
        """Add a request that costs `tokens` and does not leave by itself."""
        ticket = self.tickets[name] = self.admission.enter(key, priority, tokens - REQUEST_TOKENS)

        async def wait() -> None:
            try:
                await ticket.admitted()
                self.admitted.append(name)
            except Overloaded as exc:
                self.refused[name] = exc
                self.admission.leave(ticket)
            except asyncio.CancelledError:
                self.admission.leave(ticket)
                raise

        self.tasks[name] = asyncio.create_task(wait())
        return ticket

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)

    def is_clean(self) -> bool:
        a = self.admission
        return (len(a._queue), a._queue.tokens, a._inflight, a._choices_not_started, a._tokens_not_started) == (0,) * 5


async def soon() -> None:
    """Everyone has had a turn, the clock stands."""
    for _ in range(5):
        await asyncio.sleep(0)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtually(test)


def test_nobody_waits_before_there_has_been_any_decode() -> None:
    async def test() -> None:
        case = Case(UNKNOWN)
        assert all(case.come(str(i), 10_000).admission_result is None for i in range(100))

    run(test)


def test_one_larger_than_everything_goes_on_and_the_next_waits() -> None:
    async def test() -> None:
        case = Case()
        assert case.come("huge", 100_000).admission_result is None
        assert case.come("next").admission_result is not None
        case.admission.began(case.tickets["huge"], 100_000 - REQUEST_TOKENS)
        await soon()
        assert case.admitted == ["huge", "next"]

    run(test)


def test_ours_fill_the_line_until_they_begin() -> None:
    async def test() -> None:
        case = Case(FleetRoom(1000, 1000, 0))
        assert [case.come(str(i)).admission_result is None for i in range(6)] == [True] * 5 + [False]
        case.admission.began(case.tickets["0"], 100 - REQUEST_TOKENS)
        await soon()
        assert case.admitted[-1] == "5"
        case.come("6")
        case.admission.leave(case.tickets["1"])  # without having begun
        await soon()
        assert case.admitted[-1] == "6"

    run(test)


def test_news_of_room_lets_the_next_go_on() -> None:
    async def test() -> None:
        case = Case(FULL)
        case.come("a")
        await asyncio.sleep(1)
        assert not case.admitted
        case.room_now = EMPTY
        await asyncio.sleep(CHECK_INTERVAL_S)
        assert case.admitted == ["a"]
        assert case.value("kvmesh_request_queue_time_seconds_sum") == pytest.approx(
            1 + CHECK_INTERVAL_S, abs=CHECK_INTERVAL_S
        )

    run(test)


def test_whoever_waits_when_all_decode_is_lost_waits_for_its_return() -> None:
    """All of them went on at once, to an instance that had just come back or to none."""

    async def test() -> None:
        case = Case(FULL)
        for i in range(100):
            case.come(str(i))
        case.room_now = UNKNOWN
        await asyncio.sleep(1)
        assert not case.admitted
        case.room_now = EMPTY
        await asyncio.sleep(CHECK_INTERVAL_S)
        assert len(case.admitted) == 15

    run(test)


def test_requests_are_refused_when_no_decode_instance_comes_back() -> None:
    """They waited for the whole queue timeout, and then got 429."""

    async def test() -> None:
        case = Case(FULL, queue_timeout_s=60.0)
        for i in range(100):
            case.come(str(i))
        case.room_now = UNKNOWN
        await asyncio.sleep(1)
        assert not case.refused
        case.models = []  # the time to wait for one is over
        await asyncio.sleep(2 * CHECK_INTERVAL_S)
        assert len(case.refused) == 100
        assert {type(refusal) for refusal in case.refused.values()} == {NoDecodeInstance}
        assert case.is_clean()

    run(test)


def test_what_others_have_waiting_counts_and_ours_does_not_count_twice() -> None:
    async def test() -> None:
        case = Case()
        for i in range(5):
            case.come(str(i))
        await asyncio.sleep(CHECK_INTERVAL_S)
        case.admission._usual_tokens = 100.0
        case.room_now = FleetRoom(700, 1000, 5)  # all ours: 1,200 in all
        assert case.come("a").admission_result is None
        await asyncio.sleep(CHECK_INTERVAL_S)
        case.room_now = FleetRoom(700, 1000, 9)  # three of them others': 1,600
        assert case.come("b").admission_result is not None

    run(test)


def test_no_more_are_at_work_than_may_be() -> None:
    async def test() -> None:
        case = Case(UNKNOWN, max_inflight=2)
        assert [case.come(name).admission_result is None for name in "abc"] == [True, True, False]
        case.admission.began(case.tickets["a"], 0)
        await soon()
        assert case.admitted == ["a", "b"]
        case.admission.leave(case.tickets["a"])
        await soon()
        assert case.admitted == ["a", "b", "c"]

    run(test)


def test_whoever_waits_too_long_is_refused_and_nobody_before() -> None:
    async def test() -> None:
        case = Case(FULL)
        case.come("a")
        await asyncio.sleep(3)
        case.come("b")
        await asyncio.sleep(1.9)
        assert not case.refused
        await asyncio.sleep(0.2)
        assert set(case.refused) == {"a"}
        assert case.value("kvmesh_requests_refused_total", reason="age") == 1
        assert case.value("kvmesh_num_requests_waiting") == 1
        assert case.value("kvmesh_num_tokens_waiting") == 100

    run(test)


def test_a_full_queue_refuses_a_flood_and_sheds_it_for_another_key() -> None:
    async def test() -> None:
        case = Case(FULL, queue_tokens=1000)
        for i in range(10):
            case.come(str(i), key=b"a")
        with pytest.raises(QueueFull):
            case.come("one more", key=b"a")
        case.come("other", key=b"b")
        await soon()
        assert set(case.refused) == {"9"}
        assert [case.value("kvmesh_requests_refused_total", reason=why) for why in ("full", "shed", "age")] == [1, 1, 0]
        case.room_now = EMPTY
        await asyncio.sleep(CHECK_INTERVAL_S)
        assert case.admitted[:2] == ["0", "other"]

    run(test)


def test_when_to_come_back_is_what_waits_by_what_was_admitted_lately() -> None:
    async def test() -> None:
        case = Case(UNKNOWN, queue_tokens=5000)
        with pytest.raises(QueueFull) as early:
            raise case.admission._refusal("full", 0.0)
        assert early.value.retry_after_s == 60  # nothing to go by
        for i in range(300):
            case.admission.leave(case.come(str(i)))
            await asyncio.sleep(0.1)  # 1,000 tokens a second
        case.room_now = FULL
        for i in range(50):
            case.come(f"w{i}", key=b"%d" % i)
        with pytest.raises(QueueFull) as late:
            case.come("late")
        assert late.value.retry_after_s == pytest.approx(5, rel=0.15)

    run(test)


def test_whoever_gives_up_leaves_the_queue_at_once() -> None:
    async def test() -> None:
        case = Case(FULL)
        case.come("a")
        case.come("b")
        await soon()
        case.tasks["a"].cancel()
        await soon()
        assert case.value("kvmesh_num_requests_waiting") == 1
        case.room_now = EMPTY
        await asyncio.sleep(CHECK_INTERVAL_S)
        assert case.admitted == ["b"]

    run(test)


def test_whoever_gives_up_in_the_moment_of_its_turn_gives_its_room_back() -> None:
    async def test() -> None:
        case = Case(UNKNOWN, max_inflight=1)
        for name in "abc":
            case.come(name)
        await soon()
        case.admission.leave(case.tickets["a"])  # b is told, and has not run yet
        case.tasks["b"].cancel()
        await soon()
        assert case.admitted == ["a", "c"]
        case.admission.leave(case.tickets["c"])
        assert case.is_clean()

    run(test)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_happens_every_request_ends_once_and_nothing_is_left(seed: int) -> None:
    draw = Random(seed)

    async def test() -> None:
        case = Case(max_inflight=draw.choice((None, 1, 4)), queue_tokens=1500, queue_timeout_s=1.0)
        for number in range(80):
            case.room_now = draw.choice((UNKNOWN, EMPTY, FULL, FleetRoom(900, 1000, 7)))
            name, act = str(number), draw.randrange(5)
            if act < 3:
                try:
                    case.come(name, draw.randint(65, 400), draw.choice((b"a", b"b")), draw.choice((0, 0, 1)))
                except QueueFull as exc:
                    case.refused[name] = exc
            elif case.tickets:
                some = draw.choice(list(case.tickets))
                if act == 3:
                    case.tasks[some].cancel()
                    case.admission.leave(case.tickets[some], 10)
                elif case.tickets[some].choices_not_started and case.tickets[some].is_admitted:
                    case.admission.began(case.tickets[some], case.tickets[some].tokens - REQUEST_TOKENS)
            await asyncio.sleep(draw.choice((0, 0, 0.01, 0.3)))
            assert case.admission._queue.tokens <= 1500
            assert case.admission._inflight == sum(ticket.is_admitted for ticket in case.tickets.values())
        for name, ticket in case.tickets.items():
            case.tasks[name].cancel()
            case.admission.leave(ticket)
        await asyncio.sleep(2)
        assert case.is_clean()
        assert not case.admission._queue
        assert all(task.done() for task in case.tasks.values())
        assert len(case.admitted) == len(set(case.admitted))
        assert not set(case.admitted) & set(case.refused)

    run(test)


def test_clients_are_told_apart_by_what_they_send_however_it_is_written() -> None:
    def sent(*headers: tuple[bytes, bytes]) -> bytes:
        return read_credentials([(b"host", b"x"), *headers]).credential

    key = sent((b"authorization", b"Bearer sk-1"))
    assert key == sent((b"authorization", b"bearer  sk-1 ")) == sent((b"x-api-key", b"sk-1")) == b"sk-1"
    assert key == sent((b"authorization", b"Bearer"), (b"x-api-key", b"sk-1"))
    assert len({sent((b"authorization", b"Basic " + user)) for user in (b"YQ==", b"Yg==")}) == 2
    assert sent() == b""
    assert queue_key(b"sk-1") != queue_key(b"sk-2")
    assert b"sk-1" not in queue_key(b"sk-1")
