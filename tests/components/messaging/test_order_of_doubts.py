"""An instance whose record leaves etcd while it ends, restarts or registers again, in every order: if it answers, it stays."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import product
from random import Random
from typing import Any, Final

from components.discovery.book import InstanceBook
from components.errors import MeshError, NobodyListens, StaleInstance
from components.messaging.presence import keep_present
from components.wire.instances import AskPresent, Present
from tests.components.discovery.records import record
from tests.faults.virtual_loop import run_virtually

KEY: Final = "decode/one"
QUIET_S: Final = 15.0  # longer than between two probes
LENGTH: Final = 5  # events of an order


class Impossible(Exception):
    """An impossible order, or one equal to a shorter one."""


class Instance:
    """A process with a fixed instance id, its record in etcd, and the probes of another process."""

    def __init__(self) -> None:
        self.book = InstanceBook()
        self.runs = 1  # epoch; 0: it has ended
        self.in_etcd = 0
        self.questions: deque[tuple[asyncio.Future[Present], Present | MeshError]] = deque()
        self._epochs = 1

    async def call(self, _subject: str, asked: AskPresent, *_: Any, timeout_s: float) -> Present:
        """Make the answer now; it arrives as the order says."""
        answered: asyncio.Future[Present] = asyncio.get_running_loop().create_future()
        if self.runs == int(asked.epoch):
            self.questions.append((answered, Present(instance_id="one")))
        else:
            self.questions.append((answered, StaleInstance("another") if self.runs else NobodyListens("none")))
        return await answered

    def since_reconnect_s(self) -> float:
        return float("inf")

    async def register(self) -> None:
        if not self.runs or self.in_etcd == self.runs:
            raise Impossible
        self.in_etcd = self.runs
        self.book.put(KEY, record("one", str(self.runs)))

    async def delete(self) -> None:
        if not self.in_etcd:
            raise Impossible
        self.in_etcd = 0
        self.book.remove(KEY)
        await asyncio.sleep(0.01)

    async def restart(self) -> None:
        self._epochs += 1
        self.runs = self._epochs

    async def end(self) -> None:
        if not self.runs:
            raise Impossible
        self.runs = 0

    async def answer(self) -> None:
        if not self.questions:
            raise Impossible
        answered, answer = self.questions.popleft()
        if isinstance(answer, MeshError):
            answered.set_exception(answer)
        else:
            answered.set_result(answer)
        await asyncio.sleep(0.01)

    async def become_quiet(self) -> None:
        """Answer all probes, also repeated ones."""
        for _ in range(2):
            while self.questions:
                await self.answer()
            await asyncio.sleep(QUIET_S)


EVENTS: Final[dict[str, Callable[[Instance], Awaitable[None]]]] = {
    "deleted": Instance.delete,
    "registers": Instance.register,
    "restarts": Instance.restart,
    "ends": Instance.end,
    "answers": Instance.answer,
}


async def _run(order: tuple[str, ...]) -> None:
    one = Instance()
    async with keep_present(one, one.book, Random(0)):
        await one.register()
        known = one.in_etcd  # the latest epoch that etcd had
        for name in order:
            await EVENTS[name](one)
            known = one.in_etcd or known
            found = one.book.at(KEY)
            if one.in_etcd or known == one.runs:
                assert found == record("one", str(known)), order
        await one.become_quiet()
        found = one.book.at(KEY)
        if one.in_etcd or known == one.runs:
            assert found == record("one", str(known)), order
        else:
            assert found is None, order
            assert not one.questions, order
        assert bool(one.book.missing_in_etcd) == (known == one.runs and not one.in_etcd), order
    assert [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()] == [], order


def test_an_instance_that_answers_stays_and_one_that_is_gone_goes() -> None:
    """A late answer about a process's predecessor took the process out of the mesh."""

    async def run_all() -> int:
        ran = 0
        for order in product(EVENTS, repeat=LENGTH):
            try:
                await _run(order)
            except Impossible:
                continue
            ran += 1
        return ran

    assert run_virtually(run_all) > 100
