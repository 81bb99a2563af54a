"""A thread that owns a transfer library; the event loop may use it while idle."""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from components.errors import MeshError, TransferFailed

T = TypeVar("T")


class OwnThread:
    """Runs long work and polls. Short work runs on the caller's thread, because a handover costs more."""

    def __init__(self, name: str, poll: Callable[[], float | None]) -> None:
        """`poll` runs after each piece of work, and returns the seconds until the next; None: no poll."""
        self._name = name
        self._poll = poll
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._using = threading.Lock()  # guards the library
        # CPython's SimpleQueue.get with a timeout may hang if its thread is preempted
        self._work: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name=name)
        self._stopped = False

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        self._stopped = True
        self._work.put(None)
        await asyncio.to_thread(self._thread.join)

    def post(self, work: Callable[[], object]) -> None:
        """`work` must not raise."""
        self._check_runs()
        self._work.put(work)

    def post_short(self, work: Callable[[], bool]) -> None:
        """Run `work` here, or on the thread if that is using the library.

        `work` must not raise, and returns whether to poll.
        """
        self._check_runs()
        if not self._using.acquire(blocking=False):
            self._work.put(work)
            return
        try:
            if work():
                self.wake()
        finally:
            self._using.release()

    def wake(self) -> None:
        self._work.put(_nothing)

    async def ask(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread.

        Raises: MeshError as it is; TransferFailed for any other error.
        """
        self._check_runs()
        future: asyncio.Future[T] = self._loop.create_future()
        self._work.put(lambda: self._try(work, future))
        return await future

    def settle(self, future: asyncio.Future[Any], result: Any = None, error: MeshError | None = None) -> None:
        """Complete a future of the loop, from either thread."""
        if threading.get_ident() == self._loop_thread:
            _settle(future, result, error)
        else:
            self._loop.call_soon_threadsafe(_settle, future, result, error)

    def _check_runs(self) -> None:
        """After `stop` the library may be gone."""
        if self._stopped:
            raise TransferFailed(f"{self._name}: this process is leaving")

    def _run(self) -> None:
        patience_s: float | None = None
        while True:
            try:
                work = self._work.get(timeout=patience_s)
            except queue.Empty:
                work = _nothing
            if work is None:
                return
            with self._using:
                work()
                patience_s = self._poll()

    def _try(self, work: Callable[[], T], future: asyncio.Future[T]) -> None:
        try:
            result = work()
        except MeshError as exc:
            self.settle(future, error=exc)
        except Exception as exc:  # noqa: BLE001  the libraries' errors have no common base
            self.settle(future, error=TransferFailed(f"{self._name}: {exc or type(exc).__name__}"))
        else:
            self.settle(future, result)


def _nothing() -> None:
    return


def _settle(future: asyncio.Future[Any], result: Any, error: MeshError | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
