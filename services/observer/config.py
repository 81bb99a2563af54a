"""Settings of the observer."""

import re
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, SecretStr, model_validator
from pydantic_settings import SettingsConfigDict

from components.http.tls import Tls
from components.settings import MeshSettings
from components.telemetry.trace_store import Limits
from components.urls import is_loopback

SPANS_EACH = 50  # of a request; the limit of spans is this many times the limit of traces

_SAFE: Final = re.compile(r"[A-Za-z0-9._~+=-]+")


def _in_a_url(token: SecretStr | None) -> SecretStr | None:
    """Return `token`. Raises: ValueError, if it would have to be escaped in a URL."""
    if token is not None and not _SAFE.fullmatch(token.get_secret_value()):
        raise ValueError(
            "a token may only have letters, digits and -._~+=, as it is part of the URL in MESH_OTLP_ENDPOINT; make one with "
            "'openssl rand -hex 32'"
        )
    return token


class ObserverSettings(MeshSettings):
    """kvmesh observer: receives spans of all hosts over OTLP/HTTP and keeps the latest traces, for inspect and the page."""

    model_config = SettingsConfigDict(env_prefix="MESH_OBSERVER_", cli_prog_name="python -m services.observer")

    host: Annotated[str, Field(description="address to listen on; any but loopback requires a token")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="port to listen on; 0: any free one")] = 4318
    token: Annotated[
        SecretStr | None,
        AfterValidator(_in_a_url),
        Field(
            description="secret that senders and readers send as the password in MESH_OTLP_ENDPOINT, or as a bearer token; "
            "letters, digits and -._~+="
        ),
    ] = None
    tls_cert: Annotated[Path | None, Field(description="PEM file of a certificate and its chain, to serve https")] = (
        None
    )
    tls_key: Annotated[Path | None, Field(description="PEM file of the certificate's private key")] = None
    max_traces: Annotated[
        PositiveInt, Field(description="traces to keep; failed, moved and slow ones are counted separately")
    ] = 10_000
    max_bytes: Annotated[PositiveInt, Field(description="maximum size of the file, in bytes")] = 256 << 20
    max_body_bytes: Annotated[
        PositiveInt, Field(description="maximum size of a request in bytes, before and after decompression")
    ] = 16 << 20
    drain_timeout_s: Annotated[
        PositiveFloat, Field(description="seconds that a stopping observer may take to finish its requests")
    ] = 5.0

    @property
    def limits(self) -> Limits:
        return Limits(self.max_traces, SPANS_EACH * self.max_traces, self.max_bytes)

    @property
    def https(self) -> Tls | None:
        return Tls.of(self.tls_cert, self.tls_key)

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        Tls.of(self.tls_cert, self.tls_key)
        return self

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        if self.token is None and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host!r} is reachable from other machines: set MESH_OBSERVER_TOKEN, or listen on 127.0.0.1"
            )
        return self
