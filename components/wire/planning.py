"""inspect → planner, on `<namespace>.planner.<id>.plan`: its view of the fleet."""

from typing import Literal

from msgspec import field

from components.wire.codec import Struct, message


class RolePlan(Struct):
    least: int
    most: int
    serving: int  # reporting, and accepting requests
    wanted: int | None = None  # what the connector keeps; None: unknown
    needed: int | None = None  # within the bounds; None: too little was seen
    why: str = ""


@message("plan-ask.v1")
class AskPlan(Struct):
    pass


@message("plan-told.v1")
class PlanTold(Struct):
    leading: bool  # one planner of a namespace acts; the others wait
    connector: Literal["none", "local", "compose", "kubernetes"]
    prefill: RolePlan
    decode: RolePlan
    hold: str = ""  # why nothing changes although something might
    unknown: list[str] = field(default_factory=list)  # registered instances without reports
    changes: list[str] = field(default_factory=list)  # the latest last
