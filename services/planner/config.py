"""Settings of the planner."""

import re
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt
from pydantic_settings import NoDecode, SettingsConfigDict

from components.planning.needs import Targets
from components.planning.planner import Bounds, Pace
from components.planning.samples import Planned
from components.settings import MeshSettings

ConnectorName = Literal["none", "local", "compose", "kubernetes"]
RANGE: Final = re.compile(r"(\d+)(?:\.\.(\d+))?")


def read_bounds(text: Any) -> Any:
    """Parse `1..4`, or `2` for a fixed number. Raises: ValueError."""
    if not isinstance(text, str | int):
        return text
    found = RANGE.fullmatch(str(text).strip())
    if found is None:
        raise ValueError("must be MIN..MAX, such as 1..4")
    least, most = int(found[1]), int(found[2] or found[1])
    if not 1 <= least <= most:
        raise ValueError("must be MIN..MAX with 1 <= MIN <= MAX, because each role needs a worker")
    return Bounds(least, most)


Range = Annotated[Bounds, NoDecode, BeforeValidator(read_bounds)]


class PlannerSettings(MeshSettings):
    """kvmesh planner: computes how many prefill and decode workers the load needs, and starts and stops workers."""

    model_config = SettingsConfigDict(env_prefix="MESH_PLANNER_", cli_prog_name="python -m services.planner")

    ttft_ms: Annotated[PositiveFloat, Field(description="target for the time to first token, in milliseconds")] = 500.0
    itl_ms: Annotated[PositiveFloat, Field(description="target for the time between two tokens, in milliseconds")] = (
        50.0
    )
    goal: Annotated[
        float,
        Field(
            gt=0.5, lt=1.0, description="share of first tokens, and of gaps between tokens, that must meet the target"
        ),
    ] = 0.9
    prefill: Annotated[Range, Field(description="minimum and maximum number of prefill workers")] = Bounds(1, 1)
    decode: Annotated[Range, Field(description="minimum and maximum number of decode workers")] = Bounds(1, 1)
    devices: Annotated[
        PositiveInt | None,
        Field(description="maximum number of devices of all these workers; each worker uses --tp devices"),
    ] = None
    connector: Annotated[
        ConnectorName,
        Field(description="starts and stops workers: local, compose, kubernetes, or none (only reports decisions)"),
    ] = "none"
    every_s: Annotated[PositiveFloat, Field(description="interval of observations, in seconds")] = 5.0
    window_s: Annotated[PositiveFloat, Field(description="seconds over which load is averaged")] = 60.0
    up_after_s: Annotated[
        float, Field(ge=0, description="seconds that more workers must be needed before one is added")
    ] = 10.0
    down_after_s: Annotated[
        PositiveFloat, Field(description="seconds that fewer workers must be enough before one is removed")
    ] = 120.0
    settle_s: Annotated[
        float, Field(ge=0, description="minimum seconds between any change and the removal of a worker")
    ] = 15.0
    start_timeout_s: Annotated[
        PositiveFloat, Field(description="seconds that a worker may take to start or to drain")
    ] = 600.0
    kv_usage: Annotated[float, Field(gt=0, le=1, description="share of decode's KV pages that requests may hold")] = 0.8
    headroom: Annotated[
        float,
        Field(
            ge=0,
            description="extra load, as a share, that the remaining workers must be able to carry before one is removed",
        ),
    ] = 0.15
    backlog_s: Annotated[PositiveFloat, Field(description="seconds in which a queue must be cleared")] = 30.0
    leader_ttl_s: Annotated[
        float, Field(ge=2.0, description="seconds of silence after which another planner leads")
    ] = 10.0
    compose_file: Annotated[
        str | None, Field(description="compose: file, as for docker compose -f; several are separated by colons")
    ] = None
    compose_project: Annotated[str | None, Field(description="compose: project, as for docker compose -p")] = None
    compose_command: Annotated[str, Field(description="compose: the command")] = "docker compose"
    kubernetes_namespace: Annotated[
        str | None, Field(description="kubernetes: namespace of the workers; default: the planner's")
    ] = None
    kubernetes_prefill: Annotated[
        str, Field(description="kubernetes: deployment/NAME or statefulset/NAME of prefill")
    ] = "deployment/kvmesh-prefill"
    kubernetes_decode: Annotated[
        str, Field(description="kubernetes: deployment/NAME or statefulset/NAME of decode")
    ] = "deployment/kvmesh-decode"
    kubernetes_api: Annotated[
        str | None, Field(description="kubernetes: URL of the API; default: that of the planner's own cluster")
    ] = None

    def targets(self) -> Targets:
        return Targets(
            ttft_s=self.ttft_ms / 1000,
            itl_s=self.itl_ms / 1000,
            goal=self.goal,
            kv_usage=self.kv_usage,
            backlog_s=self.backlog_s,
            headroom=self.headroom,
        )

    def pace(self) -> Pace:
        return Pace(
            every_s=self.every_s,
            window_s=self.window_s,
            up_after_s=self.up_after_s,
            down_after_s=self.down_after_s,
            settle_s=self.settle_s,
            start_timeout_s=self.start_timeout_s,
        )

    def bounds(self) -> dict[Planned, Bounds]:
        return {"prefill": self.prefill, "decode": self.decode}
