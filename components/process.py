"""A service's process."""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from secrets import token_hex
from types import MappingProxyType
from typing import Any, Final, Protocol

import uvloop

from components.errors import BackendUnavailable
from components.settings import MeshSettings
from components.startup import CannotServe, WrongSettings, refuse
from components.wire.codec import OLDEST, PROTOCOL
from components.wire.embed import EmbeddingModel
from components.wire.instances import InstanceRecord, KvEndpoint, Role

log = logging.getLogger(__name__)

# The event loop waits this long for a Python thread: a tenth of the default.
GIL_SWITCH_S: Final = 0.0005
GC_THRESHOLDS: Final = 10_000, 10, 10  # the default 700 takes 6 % of a frontend's time
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
GIVE_UP_S: Final = 2.0  # for requests that were stopped
STARTED_UNIX_MS: Final = time.time_ns() // 1_000_000


def new_instance_id(chosen: str | None = None) -> str:
    return chosen or token_hex(4)


def subject_of(namespace: str, role: Role, instance_id: str) -> str:
    return f"{namespace}.{role}.{instance_id}"


def record_maker(
    settings: MeshSettings,
    role: Role,
    instance_id: str,
    *,
    model: str | None = None,
    adapters: Mapping[str, str] = MappingProxyType({}),
    max_context: int | None = None,
    kv: KvEndpoint | None = None,
    http: str | None = None,
    metrics: str | None = None,
    kv_events: bool = False,
    embedding: EmbeddingModel | None = None,
    max_running: int = 0,
    max_step_tokens: int = 0,
) -> Callable[[str], InstanceRecord]:
    def make(epoch: str) -> InstanceRecord:
        return InstanceRecord(
            instance_id=instance_id,
            epoch=epoch,
            role=role,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_unix_ms=STARTED_UNIX_MS,
            subject=subject_of(settings.namespace, role, instance_id),
            model=model,
            adapters=dict(adapters),
            max_context=max_context,
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            kv=kv,
            http=http,
            metrics=metrics,
            kv_events=kv_events,
            embedding=embedding,
            protocol=PROTOCOL,
            oldest_protocol=OLDEST,
        )

    return make


@contextlib.asynccontextmanager
async def stop_signals() -> AsyncIterator[Callable[[], Awaitable[object]]]:
    """Yield a function that waits for SIGTERM or SIGINT.

    Before it is called, a signal cancels the body, and the block ends without an error, so a process that is registering leaves
    no record. A second signal ends the process at once.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    stopped = asyncio.Event()
    waits = False

    def stop() -> None:
        ignore()
        stopped.set()
        if not waits:
            task.cancel()

    def ignore() -> None:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)

    def wait() -> Awaitable[object]:
        nonlocal waits
        waits = True  # not when it is awaited: a cancelled body does not drain
        return stopped.wait()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
    try:
        yield wait
    except asyncio.CancelledError:
        if not stopped.is_set() or waits or task.uncancel():
            raise
    finally:
        ignore()


async def stop_signal() -> None:
    async with stop_signals() as stopped:
        await stopped()


def settle() -> None:
    """Exclude the objects so far from garbage collection.

    Libraries leave some hundred thousand, which a full collection would walk in 60 to 90 ms.
    """
    gc.collect()
    gc.freeze()


class Drainable(Protocol):
    draining: bool

    async def drained(self) -> None: ...

    def stop_all(self, cause: str) -> None:
        """Its requests continue on other instances."""


async def drain(service: Drainable, timeout_s: float, beat: Callable[[], None]) -> None:
    """Finish the requests in flight, and cancel the rest after `timeout_s`.

    The instance stays registered: else it would count as dead.
    """
    service.draining = True
    beat()
    log.info("draining", extra={"timeout_s": timeout_s})
    try:
        async with asyncio.timeout(timeout_s):
            await service.drained()
    except TimeoutError:
        await _stop_requests(service, "this instance is leaving")


async def give_up(service: Drainable, beat: Callable[[], None]) -> None:
    """Fail the requests in flight of an instance whose engine has failed.

    Its peers then continue them at once. Decode would otherwise keep the pages that this instance may still write to.
    """
    service.draining = True
    beat()
    await _stop_requests(service, "the engine of this instance has failed")


async def _stop_requests(service: Drainable, cause: str) -> None:
    service.stop_all(cause)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(GIVE_UP_S):
            await service.drained()


def run(main: Coroutine[Any, Any, None]) -> None:
    """An error before `main` serves is one line on stderr."""
    sys.setswitchinterval(GIL_SWITCH_S)
    gc.set_threshold(*GC_THRESHOLDS)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)  # shells set 1024 for select(), unused here
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    try:
        uvloop.run(main)
    except KeyboardInterrupt:
        sys.exit(130)
    except WrongSettings as exc:
        refuse(exc.message)
    except (BackendUnavailable, CannotServe) as exc:
        sys.exit(exc.message)
    else:
        end_process()


def end_process() -> None:
    """Exit without the interpreter's teardown.

    Teardown cannot destroy frozen objects, and triton's bindings would print 30 lines of leaks.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(0)
