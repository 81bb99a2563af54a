"""Settings of the planner."""

import re
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, PositiveFloat
from pydantic_settings import NoDecode, SettingsConfigDict

from components.planning.needs import Targets
from components.planning.planner import Bounds, Pace
from components.planning.samples import Planned
from components.settings import MeshSettings

ConnectorName = Literal["none", "local", "compose", "kubernetes"]
RANGE: Final = re.compile(r"(\d+)(?:\.\.(\d+))?")


def read_bounds(text: Any) -> Any:
    """`1..4`, or `2` for always two. Raises: ValueError."""
    if not isinstance(text, str | int):
        return text
    found = RANGE.fullmatch(str(text).strip())
    if found is None:
        raise ValueError("give LEAST..MOST, such as 1..4")
    least, most = int(found[1]), int(found[2] or found[1])
    if not 1 <= least <= most:
        raise ValueError("give LEAST..MOST with 1 <= LEAST <= MOST: each role keeps a worker")
    return Bounds(least, most)


Range = Annotated[Bounds, NoDecode, BeforeValidator(read_bounds)]


class PlannerSettings(MeshSettings):
    """kvmesh planner: how many prefill and decode workers the load needs to keep its targets, and makes it so."""

    model_config = SettingsConfigDict(env_prefix="MESH_PLANNER_", cli_prog_name="python -m services.planner")

    ttft_ms: Annotated[PositiveFloat, Field(description="target for first tokens, milliseconds after acceptance")] = (
        500.0
    )
    itl_ms: Annotated[PositiveFloat, Field(description="target for gaps between tokens, milliseconds")] = 50.0
    goal: Annotated[float, Field(gt=0.5, lt=1.0, description="share of each that shall keep its target")] = 0.9
    prefill: Annotated[Range, Field(description="prefill workers, LEAST..MOST")] = Bounds(1, 1)
    decode: Annotated[Range, Field(description="decode workers, LEAST..MOST")] = Bounds(1, 1)
    connector: Annotated[
        ConnectorName,
        Field(
            description="what starts and stops workers: none (only says what it would do), local, compose, kubernetes"
        ),
    ] = "none"
    every_s: Annotated[PositiveFloat, Field(description="between two looks at the workers, seconds")] = 5.0
    window_s: Annotated[PositiveFloat, Field(description="load is averaged over so long, seconds")] = 60.0
    up_after_s: Annotated[float, Field(ge=0, description="a worker more, when it was needed for so long")] = 10.0
    down_after_s: Annotated[PositiveFloat, Field(description="a worker fewer, when it was not needed for so long")] = (
        120.0
    )
    settle_s: Annotated[float, Field(ge=0, description="from one change to the next that lets a worker go")] = 15.0
    start_timeout_s: Annotated[PositiveFloat, Field(description="for a worker to come or to drain, seconds")] = 600.0
    kv_usage: Annotated[float, Field(gt=0, le=1, description="share of decode's KV pages that requests may hold")] = 0.8
    headroom: Annotated[float, Field(ge=0, description="load that must fit besides before a worker is let go")] = 0.15
    backlog_s: Annotated[PositiveFloat, Field(description="a queue shall be cleared in so long, seconds")] = 30.0
    leader_ttl_s: Annotated[float, Field(ge=2.0, description="a planner silent for so long is replaced")] = 10.0
    compose_file: Annotated[
        str | None, Field(description="compose: the file, as docker compose -f; several: a colon between")
    ] = None
    compose_project: Annotated[str | None, Field(description="compose: the project, as docker compose -p")] = None
    compose_command: Annotated[str, Field(description="compose: the command")] = "docker compose"
    kubernetes_namespace: Annotated[str | None, Field(description="kubernetes: default: the planner's own")] = None
    kubernetes_prefill: Annotated[str, Field(description="kubernetes: what runs prefill")] = "deployment/kvmesh-prefill"
    kubernetes_decode: Annotated[str, Field(description="kubernetes: what runs decode")] = "deployment/kvmesh-decode"
    kubernetes_api: Annotated[str | None, Field(description="kubernetes: default: the cluster that this runs in")] = (
        None
    )

    def targets(self) -> Targets:
        """As the planner reckons with them."""
        return Targets(
            ttft_s=self.ttft_ms / 1000,
            itl_s=self.itl_ms / 1000,
            goal=self.goal,
            kv_usage=self.kv_usage,
            backlog_s=self.backlog_s,
            headroom=self.headroom,
        )

    def pace(self) -> Pace:
        """How fast it acts."""
        return Pace(
            every_s=self.every_s,
            window_s=self.window_s,
            up_after_s=self.up_after_s,
            down_after_s=self.down_after_s,
            settle_s=self.settle_s,
            start_timeout_s=self.start_timeout_s,
        )

    def bounds(self) -> dict[Planned, Bounds]:
        """Of each role."""
        return {"prefill": self.prefill, "decode": self.decode}
