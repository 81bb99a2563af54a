"""The frames of one decode instance, put in order; those that are missing are asked for again.

A frame may be lost while NATS, or a connection to it, restarts. A later frame shows a gap by its number. The last frame of a
stream shows none: so an instance that has been quiet for a second is asked whether it has sent anything.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from components.errors import FramesLost, MeshError
from components.wire.generate import FramesResent, TokenFrame

log = logging.getLogger(__name__)

QUIET_S: Final = 1.0  # without a frame, while streams are open: then the instance is asked
LOOK_S: Final = 0.25
AGAIN_S: Final = 0.5  # after a question that failed
ARRIVE_S: Final = 0.5  # for frames that the instance says it has sent again
MOST_HELD: Final = 4096  # frames behind a gap; later ones are asked for again

Resend = Callable[[int], Awaitable[FramesResent]]  # number of the first frame that is missing


class Arrivals:
    """Frames of one instance on their way to one frontend."""

    def __init__(
        self,
        instance_id: str,
        deal: Callable[[TokenFrame], None],
        lost: Callable[[FramesLost], None],
        resend: Resend,
    ) -> None:
        """Each frame goes to `deal` once, in order. `lost`: frames that the instance has forgotten are gone for good."""
        self._instance_id = instance_id
        self._deal = deal
        self._lost = lost
        self._resend = resend
        self._expected = 0  # number of the next frame
        self._held: dict[int, TokenFrame] = {}  # behind a gap
        self._loop = asyncio.get_running_loop()
        self._heard_s = self._loop.time()
        self._advanced = asyncio.Event()
        self._repairing: asyncio.Task[None] | None = None
        self.is_wanted = False  # whether streams from this instance are open

    def opened(self) -> None:
        """A stream is open now."""
        if not self.is_wanted:
            self.is_wanted = True
            self._heard_s = self._loop.time()

    def arrived(self, frame: TokenFrame) -> bool:
        """Deal a frame, or hold it back behind a gap. Returns: False, if it was here before."""
        if frame.number < self._expected or frame.number in self._held:
            return False
        self._heard_s = self._loop.time()
        if frame.number > self._expected:
            if len(self._held) < MOST_HELD:
                self._held[frame.number] = frame
            self.repair()
            return True
        self._expected += 1
        self._deal(frame)
        self._deal_held()
        return True

    def look(self) -> None:
        """Ask an instance that has been quiet; to be called every LOOK_S."""
        if self.is_wanted and self._loop.time() - self._heard_s > QUIET_S:
            self.repair()

    def repair(self) -> None:
        """Ask for what is missing, unless that is under way."""
        if self._repairing is None or self._repairing.done():
            self._repairing = asyncio.create_task(self._repair(), name=f"repair {self._instance_id}")

    def stop(self) -> None:
        """Ask for nothing any more."""
        self.is_wanted = False
        self._held.clear()
        if self._repairing is not None:
            self._repairing.cancel()

    async def _repair(self) -> None:
        while self.is_wanted or self._held:
            held = set(self._held)
            try:
                answer = await self._resend(self._expected)
            except MeshError as exc:  # an instance that is lost ends its streams, and with them this
                log.debug("missing frames not sent again", extra={"instance": self._instance_id, "cause": exc.message})
                await asyncio.sleep(AGAIN_S)
                continue
            for number in held:
                if number >= answer.made:  # not a frame of this instance
                    self._held.pop(number, None)
            if answer.oldest > self._expected:
                self._skip(answer.oldest)
            await self._reached(answer.next)
            self._heard_s = self._loop.time()
            if self._expected >= answer.made and not self._held:
                return

    async def _reached(self, number: int) -> None:
        """Wait until the frames before `number` are here, not for long: they may get lost like the first ones."""
        try:
            async with asyncio.timeout(ARRIVE_S):
                while self._expected < number:
                    self._advanced.clear()
                    await self._advanced.wait()
        except TimeoutError:
            pass

    def _skip(self, number: int) -> None:
        """The instance has forgotten the frames before `number`."""
        self._lost(FramesLost(f"frames {self._expected} to {number - 1} of decode {self._instance_id} are lost"))
        self._expected = number
        self._held = {n: frame for n, frame in self._held.items() if n >= number}
        self._deal_held()

    def _deal_held(self) -> None:
        while (frame := self._held.pop(self._expected, None)) is not None:
            self._expected += 1
            self._deal(frame)
        self._advanced.set()
