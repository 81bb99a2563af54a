"""Settings of the decode service."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat
from pydantic_settings import CliImplicitFlag, SettingsConfigDict

from components.routing.policies import DEFAULT
from components.settings import ABOUT_POLICIES, MeshSettings, RoutingPolicy
from engine.config import EngineConfig

OnTransferFailure = Literal["recompute", "fail"]


class DecodeSettings(MeshSettings):
    """kvmesh decode: receives every request first, fetches its KV from a prefill instance, and generates."""

    model_config = SettingsConfigDict(env_prefix="MESH_DECODE_", cli_prog_name="python -m services.decode")

    engine: EngineConfig = EngineConfig()
    drain_timeout_s: Annotated[PositiveFloat, Field(description="how long a stopping worker finishes, seconds")] = 30.0
    verify_kv: Annotated[
        CliImplicitFlag[bool],
        Field(description="check all KV that prefill sends by checksums; prefill need not be told"),
    ] = False
    on_transfer_failure: Annotated[
        OnTransferFailure,
        Field(
            description="a prompt whose KV does not come from its prefill instance: recompute it on decode, or fail the"
            " request with 502 at once, on no other instance; streams that have begun, and all prompts while there is no"
            " prefill instance, are computed on decode in both cases"
        ),
    ] = "recompute"
    prefill_policy: Annotated[
        RoutingPolicy, Field(description=f"how a prefill instance is chosen: {ABOUT_POLICIES}")
    ] = DEFAULT["prefill"]
    max_local_prefill: Annotated[
        int, Field(ge=0, description="prompt tokens left after the own prefix hit that decode computes itself")
    ] = 16
    frame_interval_ms: Annotated[
        float,
        Field(
            ge=0,
            le=1000,
            description=(
                "from one frame of tokens to a frontend to the next, at least; tokens gather so long, those of a stream"
                " that makes several meanwhile four times as long"
            ),
        ),
    ] = 3.0
    local_prefill_on_queue: Annotated[
        bool,
        Field(description="compute a prompt on decode when every prefill queue lasts longer than that would take"),
    ] = True
