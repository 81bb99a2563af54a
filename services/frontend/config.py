"""Settings of the frontend."""

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt
from pydantic_settings import SettingsConfigDict

from components.settings import MeshSettings


class FrontendSettings(MeshSettings):
    """kvmesh frontend: the OpenAI endpoint."""

    model_config = SettingsConfigDict(env_prefix="MESH_FRONTEND_", cli_prog_name="python -m services.frontend")

    host: Annotated[str, Field(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="port to listen on; 0: any free one")] = 8000
    request_timeout_s: Annotated[PositiveFloat, Field(description="longest life of one request, seconds")] = 600.0
    max_body_bytes: Annotated[PositiveInt, Field(description="largest request body")] = 8 * 1024 * 1024
    drain_timeout_s: Annotated[PositiveFloat, Field(description="how long a stop waits for requests, seconds")] = 30.0
