"""prefill → decode, over TCP: notifications for KV transfer backends that have none of their own.

A frame is a length (four bytes, big-endian) and a message.
"""

from components.wire.codec import Struct, message


@message("doorbell-ring.v1")
class Ring(Struct):
    """If `notification` is empty, the receiver only answers with its agent name."""

    notification: str = ""
    aux_slot: int = 0
    aux: bytes = b""  # the slot's bytes, if the backend does not write them


@message("doorbell-heard.v1")
class RingAcknowledged(Struct):
    agent: str  # another one may have the address by now
