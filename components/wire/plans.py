"""inspect → planner: its plan. planner → services.local: add or remove a worker. frontend → services.local: kill one."""

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
    devices: int = 1  # of a worker


@message("plan-ask.v1")
class AskPlan(Struct): ...


@message("plan-told.v1")
class PlanReported(Struct):
    leading: bool  # one planner per namespace leads
    connector: Literal["none", "local", "compose", "kubernetes"]
    prefill: RolePlan
    decode: RolePlan
    hold: str = ""
    unknown: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)  # oldest first
    most_devices: int | None = None  # of all workers together


@message("local-count.v1")
class AskCounts(Struct): ...


@message("local-scale.v1")
class ScaleRole(Struct):
    """Refused if `before` is stale, so that two planners change one worker, not two."""

    role: Literal["prefill", "decode"]
    before: int
    after: int


@message("local-counts.v1")
class Counts(Struct):
    prefill: int
    decode: int


@message("local-kill.v1")
class KillWorker(Struct):
    instance_id: str


@message("local-killed.v1")
class WorkerKilled(Struct):
    name: str  # such as decode-0
