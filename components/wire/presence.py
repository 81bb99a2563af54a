"""anyone → instance, on `<subject>.present`: is the instance whose record left etcd alive?"""

from components.wire.codec import Struct, message


@message("ask-present.v1")
class AskPresent(Struct):
    """Answered by Present; refused with StaleInstance by another process, with PeerLost by a leaving one."""

    epoch: str  # of the missing record


@message("present.v1")
class Present(Struct):
    instance_id: str
