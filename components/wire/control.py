"""inspect → any process, on `<subject>.control`: changes of a running process, in force until it ends."""

from typing import Literal

from components.wire.codec import Struct, message

LogLevel = Literal["debug", "info", "warning", "error", "default"]  # default: a logger takes its parent's
Work = Literal["go-on", "drain", "stop"]


@message("control.v1")
class Control(Struct):
    """What is left out stays as it is."""

    log_level: LogLevel | None = None
    logger: str = ""  # that gets `log_level`; "": all
    traces_per_s: float | None = None
    work: Work | None = None  # stop: drain, then end, as at SIGTERM


@message("controlled.v1")
class Controlled(Struct):
    """The process after the change."""

    log_level: str  # of the logger that was named
    traces_per_s: float
    draining: bool
