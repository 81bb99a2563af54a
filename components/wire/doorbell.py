"""prefill → decode, by TCP: notifications of KV transfer backends that have none of their own.

Frames: four bytes of length, big-endian, then the message. Each is answered before the next one is read.
"""

from components.wire.codec import Struct, message


@message("doorbell-ring.v1")
class Ring(Struct):
    """Empty `notification`: only asks which agent answers. Answered by Heard."""

    notification: str = ""
    aux_slot: int = 0
    aux: bytes = b""  # the slot's new contents, if the backend does not write it; else empty


@message("doorbell-heard.v1")
class Heard(Struct):
    agent: str  # the answering agent: the address may have another owner by now
