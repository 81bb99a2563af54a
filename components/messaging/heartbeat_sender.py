"""Heartbeats of this instance: published after steps, and on request."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Self

from msgspec import structs
from nats.aio.msg import Msg

from components.aio import background
from components.errors import MalformedMessage, MeshError
from components.messaging.bus import Bus
from components.messaging.liveness import EVERY_S, HEARTBEAT_TOLERANCE_S
from components.routing.policy import PromptLoad
from components.wire.codec import unpack
from components.wire.heartbeat import AskHeartbeat, Heartbeat
from components.wire.kv_events import unpack_hashes
from components.wire.step_stats import StepStats

log = logging.getLogger(__name__)

NumCached = Callable[[Sequence[bytes]], int]


def heartbeat_of(
    instance_id: str,
    epoch: str,
    load: StepStats,
    prompts: PromptLoad,
    *,
    draining: bool,
    is_stepping: bool = False,
    accepted: int = 0,
    num_requests: int = 0,
) -> Heartbeat:
    """`load`: of the latest step. `is_stepping`: another has begun, and may hang."""
    return Heartbeat(
        instance_id=instance_id,
        epoch=epoch,
        step=load.step,
        busy=is_stepping or load.num_running + load.num_waiting > 0,
        draining=draining,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_reserved=load.num_reserved,
        num_held=load.num_held,
        free_pages=load.free_pages,
        cached_pages=load.cached_pages,
        held_pages=load.held_pages,
        total_pages=load.total_pages,
        queued_tokens=prompts.queued_tokens,
        prompt_tokens_per_s=prompts.tokens_per_s,
        accepted=accepted,
        num_requests=num_requests,
    )


def none_cached(_hashes: Sequence[bytes]) -> int:
    return 0


class HeartbeatSender:
    """Publishes soon after a step, and at least every `EVERY_S`, or every `rest_s` if that is longer.

    Args:
        subject: prefix of this instance; heartbeats are published on `<subject>.heartbeat`.
        make: returns the load at the moment.
        rest_s: returns the minimum seconds between heartbeats that are not urgent.
        num_cached: counts the cached hashes of a query.
    """

    def __init__(
        self,
        bus: Bus,
        subject: str,
        make: Callable[[], Heartbeat],
        rest_s: Callable[[], float],
        num_cached: NumCached = none_cached,
    ) -> None:
        self._bus = bus
        self._subject = subject
        self._make = make
        self._rest_s = rest_s
        self._num_cached = num_cached
        self._step = 0
        self._made_of_step = -1
        self._progress_s = time.monotonic()  # last step or idle heartbeat
        self._due_s = math.inf  # monotonic: next heartbeat at the latest
        self._news = asyncio.Event()
        self._urgent = asyncio.Event()

    def stepped(self, step: int) -> None:
        if step != self._step:
            self._step = step
            self._news.set()

    def send_now(self) -> None:
        self._urgent.set()
        self._news.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        of_role, _, _ = self._subject.rpartition(".")
        async with (
            self._bus.subscription(f"{of_role}.ask_heartbeat", self.answer),
            self._bus.subscription(f"{self._subject}.ask_heartbeat", self.answer),
            background(self.run(), "heartbeat"),
        ):
            yield self

    async def run(self) -> None:
        while True:
            self._news.clear()
            self._urgent.clear()
            rest_s = self._rest_s()
            with suppress(MeshError):  # the bus reports its own outages
                await self._bus.publish(f"{self._subject}.heartbeat", self._heartbeat(rest_s))
            if not await _set_within(rest_s, self._urgent):
                await _set_within(EVERY_S - rest_s, self._news)

    async def answer(self, message: Msg) -> None:
        try:
            hashes = unpack_hashes(unpack(message.data, AskHeartbeat).hashes)
            heartbeat = structs.replace(self._heartbeat(self._rest_s()), cached=self._num_cached(hashes))
            await self._bus.publish(message.reply, heartbeat)
        except MalformedMessage as exc:
            self._bus.refusals.count("ask_heartbeat", exc)
        except MeshError as exc:
            log.debug("heartbeat not sent", extra={"cause": exc.message})

    def _heartbeat(self, rest_s: float) -> Heartbeat:
        heartbeat, now_s = self._make(), time.monotonic()
        was_stopped = now_s > self._due_s + HEARTBEAT_TOLERANCE_S  # the whole process was stopped, with its engine
        self._due_s = now_s + max(EVERY_S, rest_s)
        if heartbeat.step != self._made_of_step or not heartbeat.busy or was_stopped:
            self._made_of_step, self._progress_s = heartbeat.step, now_s
        return structs.replace(heartbeat, next_s=max(EVERY_S, rest_s), still_s=now_s - self._progress_s)


async def _set_within(seconds: float, event: asyncio.Event) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await event.wait()
    return False
