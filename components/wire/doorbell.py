"""prefill → decode, by TCP: what a KV transfer backend without notifications of its own says beside its writes.

Frames: four bytes of length, big-endian, then the message. Each is answered before the next one is read.
"""

from components.wire.codec import Struct, message


@message("doorbell-ring.v1")
class Ring(Struct):
    """Tell whoever expects `notification`; an empty one only asks who is there. Answered by Heard."""

    notification: str = ""
    aux_slot: int = 0
    aux: bytes = b""  # the slot's new contents, of a backend that writes none itself; else empty


@message("doorbell-heard.v1")
class Heard(Struct):
    """The other side has taken it in."""

    agent: str  # who answers: an address may by now be another process's
