import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from components.aio import BackgroundTasks, Failure, background, ended, exact_cancellation, first, raises, time_limit
from components.errors import DeadlineExceeded
from tests.waiting import PATIENCE_S


class Broken(Exception):
    pass


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run the test. Tasks left behind and unretrieved exceptions fail it."""

    async def checked() -> None:
        complaints: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, about: complaints.append(about["message"]))
        async with asyncio.timeout(PATIENCE_S):
            await test()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not complaints

    asyncio.run(checked())


async def breaks(after: int = 0) -> None:
    for _ in range(after):
        await asyncio.sleep(0)
    raise Broken


async def stubborn(seen: list[str], finish: asyncio.Event) -> None:
    """Takes time to end after a cancellation, like a write."""
    try:
        await asyncio.Event().wait()
    finally:
        try:
            await ended(asyncio.ensure_future(finish.wait()))
        finally:
            seen.append("over")


def test_first_returns_with_the_first_reason_and_ends_the_others() -> None:
    async def test() -> None:
        seen: list[str] = []
        finish = asyncio.Event()
        finish.set()
        await first(asyncio.sleep(0.001), stubborn(seen, finish))
        assert seen == ["over"]
        with pytest.raises(Broken):
            await first(asyncio.Event().wait(), breaks(), breaks())

    in_loop(test)


def test_an_awaited_error_is_raised() -> None:
    async def brings() -> BaseException:
        return Broken()

    async def test() -> None:
        with pytest.raises(Broken):
            await first(raises(brings()), asyncio.Event().wait())

    in_loop(test)


def test_background_work_is_over_when_the_body_is() -> None:
    async def test() -> None:
        seen: list[str] = []
        finish = asyncio.Event()
        finish.set()
        async with background(stubborn(seen, finish), "work"):
            await asyncio.sleep(0)
        assert seen == ["over"]
        async with background(asyncio.sleep(0), "ends by itself"):
            await asyncio.sleep(0.001)

    in_loop(test)


def test_background_work_that_fails_cancels_the_body() -> None:
    """A dead outbox or heartbeat task went unnoticed until the process left."""

    async def test() -> None:
        with pytest.raises(Broken):
            async with background(breaks(), "work"):
                await asyncio.Event().wait()

    in_loop(test)


def test_the_bodys_own_error_leaves_background_unchanged() -> None:
    async def test() -> None:
        async def body(error: BaseException, cause: Exception | None = None) -> None:
            async with background(asyncio.Event().wait(), "work"):
                raise error from cause

        with pytest.raises(ValueError, match="mine") as raised:
            await body(ValueError("mine"), Broken())
        assert isinstance(raised.value.__cause__, Broken)
        with pytest.raises(asyncio.CancelledError):
            await body(asyncio.CancelledError())

    in_loop(test)


def test_work_without_failure_returns_its_result() -> None:
    async def test() -> None:
        failure = Failure()
        assert await failure.unless(asyncio.sleep(0, "result")) == "result"
        with pytest.raises(Broken):
            await failure.unless(breaks(3))

    in_loop(test)


def test_a_failure_cancels_the_work_and_its_first_error_is_raised() -> None:
    async def test() -> None:
        seen: list[str] = []
        finish = asyncio.Event()
        failure = Failure()
        loop = asyncio.get_running_loop()
        loop.call_later(0.001, failure.report, Broken("first"))
        loop.call_later(0.001, failure.report, Broken("second"))
        loop.call_later(0.005, finish.set)
        with pytest.raises(Broken, match="first"):
            await failure.unless(stubborn(seen, finish))
        assert seen == ["over"]

    in_loop(test)


def test_a_failure_before_the_work_prevents_it() -> None:
    async def test() -> None:
        began: list[str] = []

        async def begins() -> None:
            began.append("yes")

        failure = Failure()
        failure.report(Broken())
        with pytest.raises(Broken):
            await failure.unless(begins())
        assert not began

    in_loop(test)


def test_work_that_takes_too_long_fails_and_its_timer_is_cancelled() -> None:
    async def test() -> None:
        failure = Failure()
        assert await failure.within(0.001, Broken("late"), asyncio.sleep(0, "result")) == "result"
        await asyncio.sleep(0.005)
        assert await failure.unless(asyncio.sleep(0, "again")) == "again"
        seen: list[str] = []
        finish = asyncio.Event()
        asyncio.get_running_loop().call_later(0.005, finish.set)
        with pytest.raises(Broken, match="late"):
            await failure.within(0.001, Broken("late"), stubborn(seen, finish))
        assert seen == ["over"]

    in_loop(test)


def test_a_failure_without_work_has_no_effect() -> None:
    async def test() -> None:
        Failure().report(Broken())

    in_loop(test)


def test_a_deadline_during_the_end_of_failed_work_still_waits_for_that_end() -> None:
    """A write in flight is such work: its pages were freed while NIXL still read them."""

    async def test() -> None:
        seen: list[str] = []
        finish = asyncio.Event()
        failure = Failure()
        waiting = asyncio.create_task(failure.unless(stubborn(seen, finish)))
        await asyncio.sleep(0.001)
        failure.report(Broken())
        await asyncio.sleep(0.001)
        waiting.cancel()
        await asyncio.sleep(0.001)
        assert not waiting.done()
        finish.set()
        await asyncio.wait((waiting,))
        assert waiting.cancelled()
        assert seen == ["over"]

    in_loop(test)


def test_work_that_fails_itself_stops_at_its_next_await() -> None:
    async def test() -> None:
        failure = Failure()

        async def reports(*, waits: bool) -> str:
            failure.report(Broken())
            if waits:
                await asyncio.Event().wait()
            return "done"

        with pytest.raises(Broken):
            await failure.unless(reports(waits=True))
        failure = Failure()
        assert await failure.unless(reports(waits=False)) == "done"
        await asyncio.sleep(0)  # no cancellation is left
        with pytest.raises(Broken):
            await failure.unless(asyncio.sleep(0))

    in_loop(test)


def test_a_failure_at_the_moment_of_the_result_leaves_no_cancellation() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        for report_first in (True, False):
            failure, answer = Failure(), loop.create_future()

            async def works(answer: asyncio.Future[str] = answer) -> str:
                return await answer

            def both(
                failure: Failure = failure, answer: asyncio.Future[str] = answer, first: bool = report_first
            ) -> None:
                if first:
                    failure.report(Broken())
                if not answer.done():
                    answer.set_result("done")
                if not first:
                    failure.report(Broken())

            loop.call_soon(both)
            with pytest.raises(Broken):
                await failure.unless(works())
            await asyncio.sleep(0.001)
            task = asyncio.current_task()
            assert task is not None
            assert not task.cancelling()

    in_loop(test)


def test_a_cancellation_from_outside_is_not_taken_for_a_failure() -> None:
    async def test() -> None:
        for is_reported in (False, True):
            failure = Failure()
            waiting = asyncio.create_task(failure.unless(asyncio.sleep(1000)))
            await asyncio.sleep(0)
            if is_reported:
                failure.report(Broken())
            waiting.cancel()
            await asyncio.wait((waiting,))
            assert waiting.cancelled()

    in_loop(test)


def test_failed_work_that_ends_otherwise_leaves_no_cancellation() -> None:
    """A later cancellation, by a client that leaves or a deadline, would be misunderstood."""

    async def test() -> None:
        async def works(*, fails: bool) -> str:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if fails:
                    raise ValueError from None
            return "done"

        task = asyncio.current_task()
        assert task is not None
        for fails in (False, True):
            failure = Failure()
            asyncio.get_running_loop().call_soon(failure.report, Broken())
            try:
                assert await failure.unless(works(fails=fails)) == "done"
            except ValueError:
                assert fails
            assert task.cancelling() == 0

    in_loop(test)


def test_a_deadline_around_it_and_one_within_stay_deadlines() -> None:
    async def test() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await Failure().unless(asyncio.sleep(1000))

        async def limited() -> None:
            async with time_limit(0.001, "too late after"):
                await asyncio.sleep(1000)

        with pytest.raises(DeadlineExceeded, match=r"too late after 0\.001 s"):
            await Failure().unless(limited())

    in_loop(test)


def test_a_cancellation_requested_before_the_work_waits_is_not_taken_for_a_failure() -> None:
    async def test() -> None:
        failure = Failure()

        async def waits() -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            asyncio.get_running_loop().call_soon(failure.report, Broken())
            await failure.unless(asyncio.sleep(1000))

        waiting = asyncio.create_task(waits())
        await asyncio.wait((waiting,))
        assert waiting.cancelled()

    in_loop(test)


@pytest.mark.parametrize("swallows", [False, True])
@pytest.mark.parametrize("requested", ["never", "met before", "before", "within", "while it waits"])
def test_a_task_meets_each_cancellation_once_and_no_other(requested: str, *, swallows: bool) -> None:
    """`requested`: when the task is cancelled. `swallows`: whether the work does so, or raises a CancelledError itself."""

    async def test() -> None:
        entered: list[bool] = []

        async def work(task: asyncio.Task[None]) -> None:
            if requested == "within":
                task.cancel()
            if requested == "while it waits":
                asyncio.get_running_loop().call_soon(task.cancel)
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                if not swallows:
                    raise
            if not swallows:
                raise asyncio.CancelledError

        async def cancellable() -> None:
            task = asyncio.current_task()
            assert task is not None
            if requested == "met before":
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.sleep(1000)
            if requested == "before":
                task.cancel()
            met = False
            try:
                with exact_cancellation():
                    entered.append(True)
                    await work(task)
            except asyncio.CancelledError:
                met = True
            assert met == (requested not in {"never", "met before"})
            await asyncio.sleep(0)  # not cancelled a second time

        task = asyncio.create_task(cancellable())
        await asyncio.wait((task,))
        task.result()
        assert entered

    in_loop(test)


def test_a_cancellation_of_work_that_does_not_wait_is_met_once_after_it() -> None:
    async def test() -> None:
        async def cancellable() -> None:
            task = asyncio.current_task()
            assert task is not None
            with exact_cancellation():
                task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.sleep(1000)
            await asyncio.sleep(0)

        await asyncio.create_task(cancellable())

    in_loop(test)


def test_ended_outlasts_every_cancellation_and_raises_one() -> None:
    async def test() -> None:
        finish = asyncio.Event()
        work = asyncio.create_task(finish.wait())
        waiting = asyncio.create_task(ended(work))
        for _ in range(3):
            await asyncio.sleep(0)
            waiting.cancel()
        await asyncio.sleep(0)
        assert not waiting.done()
        finish.set()
        await asyncio.wait((waiting,))
        assert waiting.cancelled()
        await ended(asyncio.create_task(breaks()))

    in_loop(test)


def test_background_tasks_are_held_until_they_end_and_waited_for_with_those_they_start() -> None:
    async def test() -> None:
        tasks, done = BackgroundTasks(), list[str]()

        async def work(name: str, then: str = "") -> None:
            await asyncio.sleep(0)
            done.append(name)
            if then:
                tasks.start(work(then), then)

        first_task = tasks.start(work("first", then="second"), "first")
        assert (first_task.get_name(), len(tasks)) == ("first", 1)
        await tasks.drain()
        assert done == ["first", "second"]
        assert not tasks

    in_loop(test)


def test_a_close_of_background_tasks_waits_for_work_that_takes_its_time_to_end() -> None:
    async def test() -> None:
        tasks, seen, finish = BackgroundTasks(), list[str](), asyncio.Event()
        tasks.start(stubborn(seen, finish))
        await asyncio.sleep(0)
        closing = asyncio.create_task(tasks.close())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not closing.done()
        finish.set()
        await closing
        assert seen
        assert not tasks

    in_loop(test)
