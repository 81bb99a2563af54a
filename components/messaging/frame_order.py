"""Puts the frames of one decode instance in order, and requests missing ones again.

A later frame reveals a gap. No frame follows a lost last one, so a quiet instance is queried.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from components.errors import FramesLost, MeshError
from components.wire.generate import FramesResent, TokenFrame

log = logging.getLogger(__name__)

QUERY_AFTER_SILENCE_S: Final = 1.0
CHECK_INTERVAL_S: Final = 0.25
RETRY_PAUSE_S: Final = 0.5  # after a failed call
RESEND_TIMEOUT_S: Final = 0.5
MAX_HELD: Final = 4096  # after a gap; later ones are requested again

Resend = Callable[[int], Awaitable[FramesResent]]  # from the first missing frame


@dataclass(slots=True)
class FrameCounts:
    """Counts over all instances."""

    lost: int = 0  # frames that the instance no longer had
    gaps: int = 0  # calls after a gap
    checks: int = 0  # calls to a quiet instance


class FrameOrder:
    def __init__(
        self,
        instance_id: str,
        deliver: Callable[[TokenFrame], None],
        lost: Callable[[FramesLost], None],
        resend: Resend,
        counts: FrameCounts,
    ) -> None:
        """`deliver` is called once for each frame, in order; `lost` for those that the instance no longer has."""
        self._instance_id = instance_id
        self._deliver = deliver
        self._lost = lost
        self._resend = resend
        self._counts = counts
        self._expected = 0
        self._held: dict[int, TokenFrame] = {}  # after a gap, by number
        self._loop = asyncio.get_running_loop()
        self._last_frame_s = self._loop.time()
        self._advanced = asyncio.Event()
        self._repairing: asyncio.Task[None] | None = None
        self.is_wanted = False  # its streams are open

    def opened(self) -> None:
        if not self.is_wanted:
            self.is_wanted = True
            self._last_frame_s = self._loop.time()

    def arrived(self, frame: TokenFrame) -> bool:
        """Deliver a frame, or hold it after a gap. False: a duplicate."""
        if frame.number < self._expected or frame.number in self._held:
            return False
        self._last_frame_s = self._loop.time()
        if frame.number > self._expected:
            if len(self._held) < MAX_HELD:
                self._held[frame.number] = frame
            self.repair()
            return True
        self._expected += 1
        self._deliver(frame)
        self._deliver_held()
        return True

    def repair_if_quiet(self) -> None:
        if self.is_wanted and self._loop.time() - self._last_frame_s > QUERY_AFTER_SILENCE_S:
            self.repair()

    def repair(self) -> None:
        if self._repairing is None or self._repairing.done():
            self._repairing = asyncio.create_task(self._repair(), name=f"repair {self._instance_id}")

    def stop(self) -> None:
        self.is_wanted = False
        self._held.clear()
        if self._repairing is not None:
            self._repairing.cancel()

    async def _repair(self) -> None:
        while self.is_wanted or self._held:
            held = set(self._held)
            if held:
                self._counts.gaps += 1
            else:
                self._counts.checks += 1
            try:
                answer = await self._resend(self._expected)
            except MeshError as exc:  # a lost instance ends its streams, and this loop
                log.debug(
                    "missing frames were not sent again", extra={"instance": self._instance_id, "cause": exc.message}
                )
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            for number in held:
                if number >= answer.made:  # not a frame of this instance
                    self._held.pop(number, None)
            if answer.oldest > self._expected:
                self._skip(answer.oldest)
            await self._reached(answer.next)
            self._last_frame_s = self._loop.time()
            if self._expected >= answer.made and not self._held:
                return

    async def _reached(self, number: int) -> None:
        """Wait for the frames before `number`, which may be lost again."""
        try:
            async with asyncio.timeout(RESEND_TIMEOUT_S):
                while self._expected < number:
                    self._advanced.clear()
                    await self._advanced.wait()
        except TimeoutError:
            pass

    def _skip(self, number: int) -> None:
        self._counts.lost += number - self._expected
        self._lost(FramesLost(f"frames {self._expected} to {number - 1} of decode {self._instance_id} are lost"))
        self._expected = number
        self._held = {n: frame for n, frame in self._held.items() if n >= number}
        self._deliver_held()

    def _deliver_held(self) -> None:
        while (frame := self._held.pop(self._expected, None)) is not None:
            self._expected += 1
            self._deliver(frame)
        self._advanced.set()
