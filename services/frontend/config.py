"""Settings of the frontend."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, SecretStr, model_validator
from pydantic_settings import CliSuppress, SettingsConfigDict

from components.http.tls import Tls
from components.messaging.records import RecordsConfig
from components.output.formats import ReasoningParserName, ToolParserName
from components.routing.kv_index import MAX_BLOCKS
from components.routing.policies import ABOUT_POLICIES, DEFAULT, KvIndexBlocks, RoutingPolicy
from components.settings import ModelSettings


@dataclass(frozen=True, slots=True)
class SlowLimits:
    """A request that reaches one of these limits counts as slow, in logs, traces, metrics and /ui."""

    ttft_s: float = 2.0  # time to first token; for a request without tokens, its whole duration
    tpot_s: float = 0.25  # per output token after the first
    stall_s: float = 2.0  # longest gap between two tokens


class FrontendSettings(ModelSettings):
    """kvmesh frontend: the OpenAI endpoint."""

    model_config = SettingsConfigDict(env_prefix="MESH_FRONTEND_", cli_prog_name="python -m services.frontend")

    host: Annotated[str, Field(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="port to listen on; 0: any free one")] = 8000
    request_lines_per_s: Annotated[
        float,
        Field(
            ge=0,
            description="log lines of ordinary requests a second, on average; slow, failed and moved requests always have "
            "one; inf: all",
        ),
    ] = 50.0
    share_port: Annotated[
        bool,
        Field(description="share the port with other frontends of this mesh, all started with this; Linux distributes"),
    ] = False
    slow_ttft_s: Annotated[
        PositiveFloat,
        Field(
            description="seconds to the first token from which a request is slow; its whole time if it has no tokens"
        ),
    ] = 2.0
    slow_tpot_s: Annotated[
        PositiveFloat, Field(description="seconds per output token after the first, from which a request is slow")
    ] = 0.25
    slow_stall_s: Annotated[
        PositiveFloat, Field(description="seconds without a token after the first, from which a request is slow")
    ] = 2.0
    tls_cert: Annotated[Path | None, Field(description="PEM file of a certificate and its chain: serve https")] = None
    tls_key: Annotated[Path | None, Field(description="PEM file of the certificate's private key")] = None
    # Not a command-line option, because all users of the machine can read those.
    api_keys: Annotated[
        CliSuppress[SecretStr | None], Field(description="API keys of clients: name:key, comma-separated")
    ] = None
    api_keys_file: Annotated[
        Path | None,
        Field(
            description="TOML file of API keys with limits, read again when it changes and on SIGHUP; docs/openai.md"
        ),
    ] = None
    share_prefix_cache: Annotated[
        bool,
        Field(
            description="let API keys of different tenants share the prefix cache. A client can then learn from latency and "
            "`cached_tokens` whether another tenant sent the same beginning of a prompt; docs/security.md"
        ),
    ] = False
    cors_origins: Annotated[
        str | None,
        Field(
            description="origins of web pages that may call this server, comma-separated, such as https://chat.example; "
            "*: any. Default: none"
        ),
    ] = None
    allowed_hosts: Annotated[
        str | None,
        Field(
            description="further host names of this server, comma-separated, accepted where no API keys are set; "
            "*.example: those below example; *: any. Always accepted: addresses, names without dots, localhost and this "
            "machine's names"
        ),
    ] = None
    request_timeout_s: Annotated[PositiveFloat, Field(description="longest life of a request, seconds")] = 600.0
    client_timeout_s: Annotated[
        PositiveFloat,
        Field(description="seconds after which a client is cut off that sends no headers or body, or reads nothing"),
    ] = 20.0
    keep_alive_s: Annotated[
        float,
        Field(
            ge=0,
            description="seconds without an event after which a stream gets a comment, so that no proxy closes it; 0: never; "
            "docs/operations.md",
        ),
    ] = 0.0
    max_body_bytes: Annotated[PositiveInt, Field(description="largest request body, bytes")] = 4 * 1024 * 1024
    decode_policy: Annotated[RoutingPolicy, Field(description=f"choice of a decode instance: {ABOUT_POLICIES}")] = (
        DEFAULT["decode"]
    )
    kv_index_blocks: KvIndexBlocks = MAX_BLOCKS
    tool_format: Annotated[
        Literal["auto", "template", "hermes"],
        Field(
            description="what describes the tools to the model: its chat template, a system prompt in Hermes format, or "
            "auto; docs/openai.md"
        ),
    ] = "auto"
    tool_parser: Annotated[
        ToolParserName | None,
        Field(description="format of the model's tool calls; default: as its chat template shows"),
    ] = None
    reasoning_parser: Annotated[
        ReasoningParserName | None,
        Field(description="format of the model's reasoning; default: as its chat template shows"),
    ] = None
    no_worker_wait_s: Annotated[
        float,
        Field(ge=0, description="seconds that requests wait for a decode instance after the last one was lost"),
    ] = 5.0
    lost_worker_wait_s: Annotated[
        float,
        Field(
            ge=0,
            description="seconds that running requests wait for a decode instance after theirs was lost; should be longer "
            "than a worker takes to restart",
        ),
    ] = 30.0
    drain_timeout_s: Annotated[
        PositiveFloat, Field(description="seconds that a stopping frontend may take to finish its requests")
    ] = 30.0
    unready_s: Annotated[
        float,
        Field(
            ge=0,
            description="seconds that a stopping frontend reports unready before it refuses connections, so that a load "
            "balancer leaves it first; docs/operations.md",
        ),
    ] = 0.0
    compile_budget_s: Annotated[
        PositiveFloat,
        Field(description="CPU seconds for checking a schema, regex or grammar; one that takes longer is refused"),
    ] = 1.0
    queue_tokens: Annotated[
        PositiveInt,
        Field(description="prompt tokens, and 64 for each choice, that may wait for decode; more is refused with 429"),
    ] = 2**20
    queue_timeout_s: Annotated[
        PositiveFloat, Field(description="seconds that a request may wait for decode; then it is refused with 429")
    ] = 60.0
    admit_load: Annotated[
        float,
        Field(gt=1, description="requests wait once demand is this many times decode's KV memory; inf: never"),
    ] = 1.5
    best_priority: Annotated[
        int,
        Field(ge=-127, le=127, description="lowest (best) priority that a request may set; overridden per API key"),
    ] = -127
    max_inflight: Annotated[
        PositiveInt | None, Field(description="requests in progress at this frontend; default: no limit")
    ] = None
    max_stored_responses: Annotated[
        int, Field(ge=0, description="responses that all frontends keep in NATS JetStream; 0: none")
    ] = 10_000
    stored_responses_bytes: Annotated[
        PositiveInt, Field(description="bytes that NATS reserves for stored responses")
    ] = 64 * 1024 * 1024
    stored_responses_age_s: Annotated[PositiveFloat, Field(description="seconds that a response is stored")] = (
        24 * 3600.0
    )
    stored_responses_replicas: Annotated[
        int, Field(ge=1, le=5, description="members of a NATS cluster that each keep the stored responses; 3 of three")
    ] = 1

    ui: Annotated[bool, Field(description="serve the page at /ui")] = True
    ui_content: Annotated[
        bool | None,
        Field(
            description="let /ui show what clients sent, such as stop sequences and values quoted in errors; default: only "
            "on a loopback address without API keys"
        ),
    ] = None
    ui_control: Annotated[
        str | None,
        Field(description="NATS subject of a services.local that may kill workers for /ui; services.local sets it"),
    ] = None

    @property
    def stored_config(self) -> RecordsConfig:
        return RecordsConfig(
            self.max_stored_responses,
            self.stored_responses_bytes,
            self.stored_responses_age_s,
            self.stored_responses_replicas,
        )

    @property
    def https(self) -> Tls | None:
        """Certificate and key for https, if set."""
        return Tls.of(self.tls_cert, self.tls_key)

    @property
    def slow(self) -> SlowLimits:
        return SlowLimits(self.slow_ttft_s, self.slow_tpot_s, self.slow_stall_s)

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        Tls.of(self.tls_cert, self.tls_key)
        return self
