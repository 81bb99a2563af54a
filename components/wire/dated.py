"""What messages with a deadline have in common: the deadline is by the clock of the process that sent the message."""

from components.wire.codec import Struct


class Dated(Struct, kw_only=True):
    """`components.messaging.clocks` converts the deadline to the receiver's clock when it reads the message."""

    deadline_unix_ms: int  # wall clock: a monotonic time means nothing in another process
    sender: str = (
        ""  # a name of the process that sent it, the same in all its messages: its instance id, or its subject
    )
    sent_unix_ms: int = 0  # by the sender's clock; 0: unknown, and the deadline is taken as it is
