"""NATS's errors as MeshErrors."""

import ssl
from types import TracebackType

import nats.errors

from components.errors import (
    BackendUnavailable,
    DeadlineExceeded,
    ListenerGone,
    MalformedMessage,
    MeshError,
    MessageTooLarge,
    NobodyListens,
)
from components.local_mesh import ENV_OF_LOCAL_MESH
from components.messaging.replies import RespondersGone
from components.messaging.secure_client import TlsRefused
from components.urls import without_password


class translated_nats_errors:  # noqa: N801 - a `contextmanager` function takes three times as long, per message
    """Turns nats-py's exceptions into MeshErrors."""

    __slots__ = ("_subject", "_url")

    def __init__(self, subject: str, url: str) -> None:
        self._subject = subject
        self._url = url

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and (mesh_error := _to_mesh_error(error, self._subject, self._url)) is not None:
            raise mesh_error from error


def _to_mesh_error(error: BaseException, subject: str, url: str) -> MeshError | None:
    if isinstance(error, nats.errors.NoRespondersError):
        kind, when = (ListenerGone, " any more") if isinstance(error, RespondersGone) else (NobodyListens, "")
        return kind(f"no process listens on {subject}{when}", subject=subject)
    if isinstance(error, nats.errors.TimeoutError | TimeoutError):
        return DeadlineExceeded(f"no answer on {subject} in time", subject=subject)
    if isinstance(error, nats.errors.MaxPayloadError):
        return MessageTooLarge(f"message for {subject} exceeds the server's max_payload", subject=subject)
    if isinstance(error, nats.errors.BadSubjectError):
        return MalformedMessage(f"{subject[:80]!r} is not a valid NATS subject", subject=subject[:80])
    # nats-py catches neither uvloop's error for a reset socket, nor errors of its own half-closed state
    if isinstance(error, nats.errors.Error | OSError | RuntimeError | AttributeError):
        return BackendUnavailable(unreachable(url, error), subject=subject)
    return None


def unreachable(url: str, exc: BaseException) -> str:
    cause = str(exc) or type(exc).__name__
    where = without_password(url)
    if "authorization" in cause.lower():
        return (
            f"NATS at {where} refuses this login ({cause}): set MESH_NATS_URL=nats://user:password@host:port, or "
            "MESH_NATS_LOGIN_FILE to a file with user:password"
        )
    if isinstance(exc, TlsRefused):
        return f"NATS at {where} is not used: {cause}"
    if isinstance(exc, ssl.SSLError):
        return (
            f"NATS at {where} and this process do not agree on TLS ({cause}): MESH_TLS__CA must have signed NATS's "
            "certificate, which must name this host; MESH_TLS__CERTIFICATE must be one that NATS accepts"
        )
    # with TLS 1.3 a server refuses a client's certificate after the handshake, by closing
    tls = "; if it runs, MESH_TLS__CERTIFICATE must be one that it accepts" if "tls://" in url else ""
    return f"NATS at {where} cannot be reached ({cause}): start one, or set MESH_NATS_URL; {ENV_OF_LOCAL_MESH}{tls}"
