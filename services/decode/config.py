"""Settings of the decode service."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat
from pydantic_settings import CliImplicitFlag, SettingsConfigDict

from components.routing.kv_index import MAX_BLOCKS
from components.routing.policies import ABOUT_POLICIES, DEFAULT, KvIndexBlocks, RoutingPolicy
from components.settings import WorkerSettings
from engine.config import EngineConfig

OnTransferFailure = Literal["recompute", "fail"]


class DecodeSettings(WorkerSettings):
    """kvmesh decode: receives each request, gets the prompt's KV from a prefill instance, and generates tokens."""

    model_config = SettingsConfigDict(env_prefix="MESH_DECODE_", cli_prog_name="python -m services.decode")

    engine: EngineConfig = EngineConfig()
    transfer_timeout_s: Annotated[
        PositiveFloat, Field(description="seconds from the offer of decode's pages to the last byte of KV")
    ] = 60.0
    verify_kv: Annotated[
        CliImplicitFlag[bool], Field(description="verify all KV from prefill by checksums; prefill needs no setting")
    ] = False
    on_transfer_failure: Annotated[
        OnTransferFailure,
        Field(
            description="a prompt whose KV does not arrive: recompute it on decode, or fail the request with 502. Streams "
            "that have begun, and prompts while there is no prefill instance, are always computed on decode"
        ),
    ] = "recompute"
    prefill_policy: Annotated[RoutingPolicy, Field(description=f"choice of a prefill instance: {ABOUT_POLICIES}")] = (
        DEFAULT["prefill"]
    )
    kv_index_blocks: KvIndexBlocks = MAX_BLOCKS
    max_local_prefill: Annotated[
        int,
        Field(ge=0, description="a prompt with at most this many tokens beyond its prefix hit is computed on decode"),
    ] = 16
    local_prefill_on_queue: Annotated[
        bool, Field(description="compute a prompt on decode if that is faster than waiting in any prefill queue")
    ] = True
    frame_interval_ms: Annotated[
        float,
        Field(
            ge=0,
            le=1000,
            description="minimum milliseconds between two frames of tokens to one frontend; a stream that makes several "
            "tokens in that time waits four times as long",
        ),
    ] = 3.0
