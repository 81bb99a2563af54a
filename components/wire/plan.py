"""planner ↔ whoever asks what it thinks. On `<namespace>.planner.<id>.plan`."""

from typing import Literal

from msgspec import field

from components.wire.codec import Struct, message


class RolePlan(Struct):
    """One role as the planner sees it."""

    least: int
    most: int
    serving: int  # heard, and taking requests
    wanted: int | None = None  # what the connector keeps; None: it does not say
    needed: int | None = None  # within least and most; None: too little was seen yet
    why: str = ""


@message("plan-ask.v1")
class AskPlan(Struct):
    """Answered by PlanTold."""


@message("plan-told.v1")
class PlanTold(Struct):
    """planner → caller."""

    leading: bool  # one planner of a namespace acts; the others wait until it is gone
    connector: Literal["none", "local", "compose", "kubernetes"]
    prefill: RolePlan
    decode: RolePlan
    hold: str = ""  # why nothing is changed although something might be
    unknown: list[str] = field(default_factory=list)  # registered instances that are not heard
    changes: list[str] = field(default_factory=list)  # the latest, newest last
