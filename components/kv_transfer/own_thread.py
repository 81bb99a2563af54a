"""A thread that alone talks to a transfer library, and the futures with which the event loop waits for it."""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from components.errors import MeshError, TransferFailed

T = TypeVar("T")


class OwnThread:
    """Posting can take long and completions must be polled: neither belongs on the event loop."""

    def __init__(self, name: str, poll: Callable[[], float | None]) -> None:
        """`poll` runs on the thread, after each piece of work and then again after as many seconds as it returns.

        None lets the thread sleep until there is work.
        """
        self._name = name
        self._poll = poll
        self._loop = asyncio.get_running_loop()
        # No SimpleQueue: with a timeout, `get` of CPython's waits for ever if its thread loses the processor at a bad moment.
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name=name)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    async def stop(self) -> None:
        """End; what was handed over before is done first."""
        self._work.put(None)
        await asyncio.to_thread(self._thread.join)

    def post(self, work: Callable[[], None]) -> None:
        """Do this; it must not raise."""
        self._work.put(work)

    async def ask(self, work: Callable[[], T]) -> T:
        """The result of `work`. Raises: MeshError as it is, TransferFailed for anything else."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._work.put(lambda: self._try(work, future))
        return await future

    def settle(self, future: asyncio.Future[Any], result: Any = None, error: MeshError | None = None) -> None:
        """From the thread: complete a future of the loop, unless somebody has cancelled it."""
        self._loop.call_soon_threadsafe(_settle, future, result, error)

    def _run(self) -> None:
        patience_s: float | None = None
        while True:
            try:
                work = self._work.get(timeout=patience_s)
            except queue.Empty:
                pass
            else:
                if work is None:
                    return
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


def _settle(future: asyncio.Future[Any], result: Any, error: MeshError | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
