"""Messages with a deadline by the sender's clock."""

from components.wire.codec import Struct


class Dated(Struct, kw_only=True):
    """`components.messaging.clocks` converts the deadline to the receiver's clock."""

    deadline_unix_ms: int  # wall clock: monotonic times differ between processes
    sender: str = ""  # sender's instance id or subject, the same in all its messages
    sent_unix_ms: int = 0  # by the sender's clock; 0: unknown, and the deadline is not converted
