"""inspect → any process, on `<subject>.control`: changes settings until the process ends."""

from typing import Literal

from components.wire.codec import Struct, message

LogLevel = Literal["debug", "info", "warning", "error", "default"]  # default: a logger takes its parent's
Work = Literal["go-on", "drain", "stop"]


@message("control.v1")
class Control(Struct):
    """Settings that are left out do not change."""

    log_level: LogLevel | None = None
    logger: str = ""  # whose level is set; "": all
    traces_per_s: float | None = None
    work: Work | None = None  # stop: drain, then end, as at SIGTERM


@message("controlled.v1")
class Controlled(Struct):
    """The settings after the change."""

    log_level: str  # of the named logger
    traces_per_s: float
    draining: bool
