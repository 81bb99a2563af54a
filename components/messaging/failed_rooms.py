"""Reports to decode that a room's transfer has failed."""

import logging

from components.errors import MeshError
from components.messaging.bus import Bus
from components.wire.prefill import RoomFailed

log = logging.getLogger(__name__)


async def report_room_failed(
    bus: Bus, decode: str, request_id: str, room: str, error: MeshError, *, stamp: int = 0
) -> None:
    """Report to `decode`, an instance's subject. If the report is lost, decode waits for the transfer's timeout.

    `stamp`: as in `RoomFailed`.
    """
    failed = RoomFailed(request_id=request_id, room=room, error=type(error).__name__, cause=error.message, stamp=stamp)
    try:
        await bus.publish(f"{decode}.room_failed", failed)
    except MeshError as exc:
        log.warning(
            "decode could not be notified that a transfer failed, and waits for its timeout",
            extra={"room": room, "subject": decode, "cause": exc.message},
        )
