"""inspect → planner: its plan. planner → services.local: change the number of workers by one."""

from typing import Literal

from msgspec import field

from components.wire.codec import Struct, message


class RolePlan(Struct):
    least: int
    most: int
    serving: int  # report and accept requests
    wanted: int | None = None  # by the connector; None: unknown
    needed: int | None = None  # by load; None: unknown
    why: str = ""


@message("plan-ask.v1")
class AskPlan(Struct):
    """On `<namespace>.planner.<id>.plan`; answered by PlanTold."""


@message("plan-told.v1")
class PlanTold(Struct):
    leading: bool  # only one planner of a namespace acts
    connector: Literal["none", "local", "compose", "kubernetes"]
    prefill: RolePlan
    decode: RolePlan
    hold: str = ""  # reason for waiting with a change
    unknown: list[str] = field(default_factory=list)  # instances without reports
    changes: list[str] = field(default_factory=list)  # the latest last


@message("local-count.v1")
class AskCounts(Struct):
    """On `<namespace>.local.<id>.count`; answered by Counts."""


@message("local-scale.v1")
class ScaleRole(Struct):
    """On `<namespace>.local.<id>.scale`; answered by the new Counts, or Refused.

    Refused if `before` is stale, so that two planners with the same reports change one worker, not two.
    """

    role: Literal["prefill", "decode"]
    before: int
    after: int  # one more or less


@message("local-counts.v1")
class Counts(Struct):
    prefill: int
    decode: int
