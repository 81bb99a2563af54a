"""The choice of a bootstrap replica: hedged calls, and a circuit breaker for each replica."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from random import Random
from typing import Any, Final

from components.aio import BackgroundTasks, exception_of
from components.errors import DeadlineExceeded, NoBootstrapInstance, Overloaded, PeerBroken, PeerLost
from components.routing.health import Breaker, BreakerSettings
from components.wire.instances import InstanceRecord

OPEN_TIMEOUT_S: Final = 1.5  # short, because a replica only writes to memory to open a room
HEDGE_AFTER_S: Final = 0.1  # hedging delay: the next replica is called, too, if there is no answer by then
BREAKER_SETTINGS: Final = BreakerSettings(
    failures=1, first_backoff_s=5.0, max_backoff_s=30.0, trial_timeout_s=OPEN_TIMEOUT_S
)

CallReplica = Callable[[InstanceRecord], Coroutine[Any, Any, None]]


class BootstrapChoice:
    def __init__(self, rng: Random, *, or_none: bool) -> None:
        """`or_none`: call no replica if all breakers are open, because decode can compute the prompt itself."""
        self._rng = rng
        self._or_none = or_none
        self._turn = count()
        self._breakers: dict[str, Breaker] = {}  # by replica
        self._called_s: dict[str, list[float]] = {}  # start times of pending calls, by replica
        self._calls = BackgroundTasks()

    def states(self) -> dict[str, str]:
        """Circuit breaker state of each replica that was called."""
        return {instance_id: str(breaker.state) for instance_id, breaker in self._breakers.items()}

    async def open(self, replicas: Sequence[InstanceRecord], call_replica: CallReplica) -> None:
        """Open a room at one of `replicas`; return when one has opened it. `call_replica` calls one, within `OPEN_TIMEOUT_S`.

        Several replicas may open the same room: prefill takes the first offer, and closes the other rooms.
        Raises: NoBootstrapInstance; a replica's refusal, unless the replica drains.
        """
        cause = "no replica has answered lately"
        waiting: set[asyncio.Task[None]] = set()
        order = self._order(replicas)
        while order or waiting:
            if order:
                waiting.add(self._call(order.pop(0), call_replica))
            timeout_s = HEDGE_AFTER_S if order else None
            done, waiting = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for call in done:
                error = call.exception()
                if error is None:
                    return
                if not isinstance(error, PeerLost | PeerBroken | DeadlineExceeded | Overloaded):
                    raise error
                cause = str(error)
        raise NoBootstrapInstance(f"no bootstrap instance opened a room: {cause}")

    def _order(self, replicas: Sequence[InstanceRecord]) -> list[InstanceRecord]:
        """Replicas whose answer is late come last."""
        now_s = asyncio.get_running_loop().time()
        ids = {replica.instance_id for replica in replicas}
        self._breakers = {i: breaker for i, breaker in self._breakers.items() if i in ids}
        first = next(self._turn) % max(len(replicas), 1)
        turn = [*replicas[first:], *replicas[:first]]
        ready = [r for r in turn if (b := self._breakers.get(r.instance_id)) is None or b.ready_s <= now_s]
        if not ready and not self._or_none:
            ready = turn
        return sorted(ready, key=lambda r: self._is_late(r.instance_id, now_s))

    def _is_late(self, instance_id: str, now_s: float) -> bool:
        called_s = self._called_s.get(instance_id)
        return called_s is not None and now_s - called_s[0] >= HEDGE_AFTER_S

    def _call(self, replica: InstanceRecord, call_replica: CallReplica) -> asyncio.Task[None]:
        """Start a call. It continues after another replica has answered, so that the breaker also counts its timeout."""
        task = self._calls.start(self._report_outcome(replica.instance_id, call_replica(replica)), "open room")
        task.add_done_callback(exception_of)  # or asyncio logs it
        return task

    async def _report_outcome(self, instance_id: str, call: Coroutine[Any, Any, None]) -> None:
        """For the breaker, a refusal is a success: the replica is alive."""
        clock = asyncio.get_running_loop().time
        if instance_id not in self._breakers:
            self._breakers[instance_id] = Breaker(f"bootstrap {instance_id}", self._rng, BREAKER_SETTINGS)
        breaker, called_s = self._breakers[instance_id], clock()
        trial = breaker.sent(called_s)
        self._called_s.setdefault(instance_id, []).append(called_s)
        try:
            await call
        except DeadlineExceeded:
            breaker.failed(clock())
            raise
        except PeerLost:  # no listener: the call failed at once
            if trial is not None:
                breaker.undecided(trial, clock())
            raise
        except Exception:
            breaker.succeeded()
            raise
        else:
            breaker.succeeded()
        finally:
            self._called_s[instance_id].remove(called_s)
            if not self._called_s[instance_id]:
                del self._called_s[instance_id]
