"""Settings of the frontend."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, SecretStr, model_validator
from pydantic_settings import CliSuppress, SettingsConfigDict

from components.output.formats import ReasoningParserName, ToolParserName
from components.routing.policies import DEFAULT
from components.settings import ABOUT_POLICIES, MeshSettings, RoutingPolicy


class FrontendSettings(MeshSettings):
    """kvmesh frontend: the OpenAI endpoint."""

    model_config = SettingsConfigDict(env_prefix="MESH_FRONTEND_", cli_prog_name="python -m services.frontend")

    host: Annotated[str, Field(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="port to listen on; 0: any free one")] = 8000
    share_port: Annotated[
        bool,
        Field(description="several frontends of this mesh on one port, each started with this; Linux deals it out"),
    ] = False
    tls_cert: Annotated[Path | None, Field(description="PEM file of a certificate and its chain: serve https")] = None
    tls_key: Annotated[Path | None, Field(description="PEM file of its private key")] = None
    # not in --help: what stands on a command line, everyone on the machine can read
    api_keys: Annotated[
        CliSuppress[SecretStr | None], Field(description="keys that clients must bring: name:key, comma-separated")
    ] = None
    api_keys_file: Annotated[
        Path | None,
        Field(
            description="more of them, with limits, as TOML; read again when it changes, and on SIGHUP; docs/openai.md"
        ),
    ] = None
    share_prefix_cache: Annotated[
        bool,
        Field(
            description="API keys of different tenants share the prefix cache: a client can then find out, by times and "
            "`cached_tokens`, whether another one has sent the same beginning of a prompt; docs/security.md"
        ),
    ] = False
    cors_origins: Annotated[
        str | None,
        Field(
            description="origins whose pages may ask, comma-separated, such as https://chat.example; *: any. Default: none"
        ),
    ] = None
    allowed_hosts: Annotated[
        str | None,
        Field(
            description="further host names by which clients call this server where there are no API keys, comma-separated; "
            "*.example: those below example; *: any. Default: addresses, names without dots, localhost and this machine's"
        ),
    ] = None
    request_timeout_s: Annotated[PositiveFloat, Field(description="longest life of one request, seconds")] = 600.0
    client_timeout_s: Annotated[
        PositiveFloat,
        Field(
            description="a client whose headers or body do not come, or that reads nothing, for so long is cut off, seconds"
        ),
    ] = 20.0
    max_body_bytes: Annotated[PositiveInt, Field(description="largest request body")] = 4 * 1024 * 1024
    decode_policy: Annotated[RoutingPolicy, Field(description=f"how a decode instance is chosen: {ABOUT_POLICIES}")] = (
        DEFAULT["decode"]
    )
    tool_format: Annotated[
        Literal["auto", "template", "hermes"],
        Field(description="who tells the model of tools: its chat template, words of ours, or auto; docs/openai.md"),
    ] = "auto"
    tool_parser: Annotated[
        ToolParserName | None, Field(description="how it writes calls of tools; default: what its chat template shows")
    ] = None
    reasoning_parser: Annotated[
        ReasoningParserName | None, Field(description="how it sets reasoning apart; default: likewise")
    ] = None
    no_worker_wait_s: Annotated[
        float,
        Field(ge=0, description="how long requests wait for a decode instance after the last one was lost, seconds"),
    ] = 5.0
    drain_timeout_s: Annotated[PositiveFloat, Field(description="how long a stop waits for requests, seconds")] = 30.0
    compile_budget_s: Annotated[
        PositiveFloat,
        Field(description="CPU seconds for checking one schema, regex or grammar; what takes longer is refused"),
    ] = 1.0
    queue_tokens: Annotated[
        PositiveInt,
        Field(description="prompt tokens that may wait for decode to have room, 64 added a choice; past it 429"),
    ] = 2**20
    queue_timeout_s: Annotated[PositiveFloat, Field(description="longest wait for it, seconds; past it 429")] = 60.0
    admit_load: Annotated[
        float,
        Field(
            gt=1, description="requests wait once decode's KV memory is this many times taken and asked for; inf: never"
        ),
    ] = 1.5
    best_priority: Annotated[
        int,
        Field(
            ge=-127,
            le=127,
            description="the best, that is lowest, priority that a request may ask for; a key's own goes before it",
        ),
    ] = -127
    max_inflight: Annotated[
        PositiveInt | None, Field(description="requests of this frontend at work at a time; default: no limit")
    ] = None
    max_stored_responses: Annotated[
        int, Field(ge=0, description="responses kept in NATS JetStream, of all frontends; 0: none are")
    ] = 10_000
    stored_responses_bytes: Annotated[PositiveInt, Field(description="bytes of them, which NATS sets aside")] = (
        64 * 1024 * 1024
    )
    stored_responses_age_s: Annotated[PositiveFloat, Field(description="how long they are kept, seconds")] = 24 * 3600.0

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together")
        return self
