"""Settings of the bootstrap service."""

from typing import Annotated

from pydantic import Field, PositiveFloat
from pydantic_settings import SettingsConfigDict

from components.settings import MeshSettings


class BootstrapSettings(MeshSettings):
    """kvmesh bootstrap: bootstrap rooms, each pairing one prefill and one decode for one KV transfer."""

    model_config = SettingsConfigDict(env_prefix="MESH_BOOTSTRAP_", cli_prog_name="python -m services.bootstrap")

    room_cleanup_s: Annotated[PositiveFloat, Field(description="seconds between removals of expired rooms")] = 5.0
