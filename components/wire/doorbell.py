"""prefill → decode, by TCP: notifications for KV transfer backends that have none.

A frame is the message and, before it, its length in four bytes, big-endian. Frames are answered in order.
"""

from components.wire.codec import Struct, message


@message("doorbell-ring.v1")
class Ring(Struct):
    """Answered by Heard. An empty `notification` only asks which agent answers."""

    notification: str = ""
    aux_slot: int = 0
    aux: bytes = b""  # of the slot, if the backend does not write it


@message("doorbell-heard.v1")
class Heard(Struct):
    agent: str  # the address may belong to another agent by now
