"""The number of threads of a step, on a simulated machine."""

import logging

import pytest

from engine.cpu.thread_limit import LAST_RETRY_S, ThreadLimit


class Machine:
    """Cores, some busy with neighbours. Threads without a core wait."""

    def __init__(self, cores: int, *, reports: bool = True) -> None:
        """`reports`: the number of unused cores, like /proc/stat on most systems."""
        self.now = 50.0
        self.waited_s = self.unused_s = 0.0
        self.free = cores
        self.limit = ThreadLimit(
            cores,
            waited_s=lambda: self.waited_s,
            unused_s=lambda: self.unused_s if reports else None,
            clock=lambda: self.now,
        )

    def step(self, step_s: float = 0.02, threads: int | None = None) -> int:
        """Run a step, by default with the most threads. Return their number."""
        used = self.limit.threads if threads is None else threads
        self.limit.begin(used)
        self.limit.begin(used)  # the loop asks, and the runner asks again
        self.waited_s += 0.95 * step_s * max(0, used - self.free)
        self.rest(step_s)
        self.limit.end()
        return used

    def rest(self, seconds: float) -> None:
        self.now += seconds
        self.unused_s += self.free * seconds

    def steps(self, seconds: float, step_s: float = 0.02) -> list[int]:
        """Run steps for `seconds`; return their numbers of threads."""
        return [self.step(step_s) for _ in range(round(seconds / step_s))]


def test_steps_on_a_quiet_machine_keep_all_threads() -> None:
    assert set(Machine(4).steps(20)) == {4}


def test_a_busy_neighbour_takes_one_thread_of_two_within_a_tenth_of_a_second() -> None:
    """Steps kept both threads, one of which waited for the other: 91 tokens/s became 1.4."""
    machine = Machine(2)
    machine.free = 1
    assert machine.steps(0.12)[-1] == 1


def test_no_step_tries_one_thread_more_while_the_neighbour_stays() -> None:
    """A try every 4 s, of some steps of 80 ms, determined the 99th percentile of ITL."""
    machine = Machine(2)
    machine.free = 1
    machine.steps(1)
    assert set(machine.steps(LAST_RETRY_S - 2)) == {1}


@pytest.mark.parametrize("reports", [True, False])
def test_few_steps_try_one_thread_more_in_a_long_time(*, reports: bool) -> None:
    machine = Machine(2, reports=reports)
    machine.free = 1
    machine.steps(30)
    assert 0 < machine.steps(40).count(2) / 2000 < 0.01


def test_a_thread_comes_back_at_once_when_the_neighbour_has_gone() -> None:
    machine = Machine(2)
    machine.free = 1
    machine.steps(40)
    machine.free = 2
    assert machine.steps(0.6)[-1] == 2


def test_many_threads_come_back_soon_after_the_neighbours_have_gone() -> None:
    machine = Machine(8)
    machine.free = 3
    assert machine.steps(1)[-1] in {3, 4}
    machine.steps(20)
    machine.free = 8
    assert machine.steps(1)[-1] == 8


def test_a_thread_comes_back_within_few_long_steps_when_the_neighbour_has_gone() -> None:
    """A prompt is one step: ten prompts had only one thread after the neighbour had left."""
    machine = Machine(2)
    machine.free = 1
    machine.steps(30, step_s=1.0)
    machine.free = 2
    assert machine.steps(4, step_s=1.0)[-1] == 2


def test_a_core_that_is_idle_between_steps_is_not_room_for_a_thread() -> None:
    """A worker without steps leaves its own core idle, which is no second one."""
    machine = Machine(2)
    machine.free = 1
    used = [machine.step()]
    while machine.now < 60:
        machine.rest(0.02)
        used.append(machine.step())
    assert used.count(2) < 10


def test_threads_that_low_priority_neighbours_yield_to_come_back() -> None:
    """Neighbours of low priority leave no core idle, so no room was seen."""
    machine = Machine(2)
    machine.free = 1
    machine.steps(1)
    machine.waited_s, machine.free = 0.0, 2  # this step's threads need not wait, while the neighbours use what is left
    unused_s = machine.unused_s
    for _ in range(round((LAST_RETRY_S + 1) / 0.02)):
        machine.step()
        machine.unused_s = unused_s = unused_s + 0.02
    assert machine.limit.threads == 2


def test_where_idle_cores_are_not_reported_threads_come_back_by_tries() -> None:
    machine = Machine(2, reports=False)
    machine.free = 1
    machine.steps(0.1)
    machine.free = 2
    assert machine.steps(1)[-1] == 2
    machine.free = 1
    machine.steps(60)
    machine.free = 2
    assert machine.steps(LAST_RETRY_S + 1)[-1] == 2


def test_many_neighbours_take_many_threads_in_a_few_steps_and_leave_one() -> None:
    machine = Machine(64)
    machine.free = 20
    assert machine.steps(1)[-1] in {20, 21}
    machine.free = 0
    assert machine.steps(2)[-1] == 1


def test_long_steps_try_one_thread_more_seldom() -> None:
    """Steps of a large model take seconds: every second step would try one thread more."""
    machine = Machine(2)
    machine.free = 1
    assert machine.steps(200, step_s=2.0).count(2) < 12


def test_a_step_with_one_thread_tells_nothing_about_two() -> None:
    """A wait while another worker has the other core is no reason for fewer threads later."""
    machine = Machine(2)
    machine.free = 0
    for _ in range(20):
        machine.step(threads=1)
    assert machine.limit.threads == 2


def test_a_try_that_fails_late_because_another_worker_had_the_core_is_still_a_try(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Steps with fewer threads than the limit confirmed it, so each later fall was logged as the first one."""
    machine = Machine(2)
    machine.limit.threads = 1
    while machine.limit.threads == 1:
        machine.step()
    for _ in range(20):
        machine.step(threads=1)
    machine.free = 1
    with caplog.at_level(logging.INFO):
        machine.steps(1)
    assert machine.limit.threads == 1
    assert not caplog.records


def test_waits_below_the_bound_take_no_thread() -> None:
    """The mesh's frontend needs part of a core."""
    machine = Machine(2)
    for _ in range(100):
        machine.waited_s += 0.3 * 0.02
        machine.step()
    assert machine.limit.threads == 2


def test_decodes_have_fewer_threads_than_prompts_where_a_quota_is_no_whole_number() -> None:
    limit = ThreadLimit(2, 1)
    assert (limit.of_step(prompts=True), limit.of_step(prompts=False)) == (2, 1)


def test_an_end_without_a_step_changes_nothing() -> None:
    machine = Machine(2)
    machine.limit.end()
    machine.waited_s += 100
    assert machine.step() == 2
    assert machine.limit.threads == 2


def test_fewer_threads_are_logged_once_however_often_more_are_tried(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(2)
    machine.free = 1
    with caplog.at_level(logging.INFO):
        machine.steps(60)
    [record] = caplog.records
    assert (record.__dict__["threads"], record.__dict__["of"]) == (1, 2)
