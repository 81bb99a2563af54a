"""anyone → instance, on `<subject>.present`: is the instance whose record left etcd still alive?"""

from components.wire.codec import Struct, message


@message("ask-present.v1")
class AskPresent(Struct):
    """Answered by Present, or refused with StaleInstance by another process, with PeerLost by one that is leaving."""

    epoch: str  # of the record that left etcd


@message("present.v1")
class Present(Struct):
    """The instance lives."""

    instance_id: str
