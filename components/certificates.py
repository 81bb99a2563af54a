"""TLS files of this process as a client of etcd and NATS."""

import ssl
from pathlib import Path
from typing import Annotated, Final, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from components.followed_files import FollowedFiles, read_file
from components.startup import WrongSettings

CA: Final = "MESH_TLS__CA"
CERTIFICATE: Final = "MESH_TLS__CERTIFICATE"
KEY: Final = "MESH_TLS__KEY"


class TlsFiles(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    ca: Annotated[
        Path | None,
        Field(
            description="PEM file of the authorities that sign certificates of etcd, NATS and the observer; default: "
            "the system's"
        ),
    ] = None
    certificate: Annotated[
        Path | None, Field(description="PEM file with this process's certificate, and its chain, for etcd and NATS")
    ] = None
    key: Annotated[Path | None, Field(description="PEM file with the private key of that certificate")] = None

    @property
    def given(self) -> list[Path]:
        return [path for path in (self.ca, self.certificate, self.key) if path is not None]


class Pem(NamedTuple):
    """In the order of `grpc.ssl_channel_credentials`."""

    ca: bytes | None
    key: bytes | None
    certificate: bytes | None


class Identity(NamedTuple):
    context: ssl.SSLContext
    pem: Pem


class Certificates:
    def __init__(self, files: TlsFiles) -> None:
        self.files = files
        self._followed = FollowedFiles(files.given, self._read)

    def current(self) -> Identity:
        """Raises: WrongSettings, at the first call."""
        return self._followed.current()

    def _read(self) -> Identity:
        files = self.files
        if (files.certificate is None) != (files.key is None):
            raise WrongSettings(f"{CERTIFICATE} and {KEY} belong together: set both or neither")
        ca = None if files.ca is None else read_file(files.ca, CA)
        context = _trusting(ca, files.ca)
        if files.certificate is None or files.key is None:
            return Identity(context, Pem(ca, None, None))
        certificate, key = read_file(files.certificate, CERTIFICATE), read_file(files.key, KEY)
        _check_kind(certificate, b"CERTIFICATE", f"{CERTIFICATE} {files.certificate}: this is not a PEM certificate")
        _check_kind(key, b"PRIVATE KEY", f"{KEY} {files.key}: this is not a PEM private key")
        try:
            context.load_cert_chain(files.certificate, files.key, password=lambda: "")  # else OpenSSL asks the terminal
        except (OSError, ValueError) as exc:
            raise WrongSettings(
                f"{KEY} {files.key}: this is not the private key, without a passphrase, of {CERTIFICATE} "
                f"{files.certificate} ({_reason(exc)})"
            ) from exc
        return Identity(context, Pem(ca, key, certificate))


def _trusting(ca: bytes | None, path: Path | None) -> ssl.SSLContext:
    if ca is None:
        return ssl.create_default_context()
    _check_kind(ca, b"CERTIFICATE", f"{CA} {path}: this is not a PEM certificate")
    try:
        return ssl.create_default_context(cadata=ca.decode("ascii", "replace"))
    except (OSError, ValueError) as exc:
        raise WrongSettings(f"{CA} {path}: this certificate cannot be read ({_reason(exc)})") from exc


def _check_kind(pem: bytes, kind: bytes, otherwise: str) -> None:
    if kind not in pem:
        raise WrongSettings(otherwise)


def _reason(exc: Exception) -> str:
    return (exc.reason if isinstance(exc, ssl.SSLError) else None) or str(exc) or type(exc).__name__
