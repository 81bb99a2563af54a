"""How this process authenticates to etcd and NATS.

A login in an address wins over the files. Without any, the certificate alone names the user.
"""

import base64
import binascii
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from components.certificates import Certificates, TlsFiles
from components.followed_files import FollowedFiles, read_file
from components.startup import WrongSettings
from components.urls import Login, basic

NATS_LOGIN: Final = "MESH_NATS_LOGIN_FILE"
NATS_NKEY: Final = "MESH_NATS_NKEY_FILE"
NATS_CREDENTIALS: Final = "MESH_NATS_CREDENTIALS_FILE"
METRICS_LOGIN: Final = "MESH_METRICS_LOGIN_FILE"
ETCD_LOGIN: Final = "MESH_ETCD_LOGIN_FILE"
INBOX: Final = "_INBOX"  # NATS's default
_USER: Final = 20 << 3  # type byte of a user's public key
_SEED: Final = 18 << 3

T = TypeVar("T")


def _no_certificates() -> Certificates:
    return Certificates(TlsFiles())


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    certificates: Certificates = field(default_factory=_no_certificates)
    login: FollowedFiles[Login] | None = None


@dataclass(frozen=True, slots=True)
class NatsAccess:
    """At most one of the three files is given."""

    certificates: Certificates = field(default_factory=_no_certificates)
    login: FollowedFiles[Login] | None = None
    key: "FollowedFiles[Nkey] | None" = None
    credentials: "FollowedFiles[Credentials] | None" = None
    inbox: str = INBOX  # prefix of this process's reply subjects

    @property
    def may_change(self) -> bool:
        """Return whether a refused connection may later be accepted, with other content of the files."""
        return any((self.login, self.key, self.credentials, self.certificates.files.given))

    def check(self) -> None:
        """Raises: WrongSettings."""
        given = [
            name
            for name, one in ((NATS_LOGIN, self.login), (NATS_NKEY, self.key), (NATS_CREDENTIALS, self.credentials))
            if one is not None
        ]
        if len(given) > 1:
            raise WrongSettings(f"{' and '.join(given)}: give one of them")
        for one in (self.login, self.key, self.credentials):
            if one is not None:
                one.current()


@dataclass(frozen=True, slots=True)
class PageAccess:
    """A reader's access to metrics pages: the certificates it trusts and the login it sends."""

    certificates: Certificates = field(default_factory=_no_certificates)
    login: FollowedFiles[Login] | None = None

    def headers(self) -> dict[str, str]:
        return {} if self.login is None else {"Authorization": basic(self.login.current())}

    def context(self, url: str) -> ssl.SSLContext | None:
        return self.certificates.current().context if url.startswith("https:") else None


def login_file(path: Path | None, variable: str) -> FollowedFiles[Login] | None:
    return _followed(path, lambda file: _login(file, variable))


def nkey_file(path: Path | None) -> "FollowedFiles[Nkey] | None":
    return _followed(path, lambda file: _key(read_file(file, NATS_NKEY), f"{NATS_NKEY} {file}"))


def credentials_file(path: Path | None) -> "FollowedFiles[Credentials] | None":
    return _followed(path, _credentials)


class Nkey(NamedTuple):
    """An Ed25519 key that NATS knows a user by."""

    public: str
    sign: Callable[[str], bytes]  # nonce → signature, in base64


class Credentials(NamedTuple):
    """A user's JWT and key."""

    jwt: bytes
    key: Nkey


def _followed(path: Path | None, read: Callable[[Path], T]) -> FollowedFiles[T] | None:
    return None if path is None else FollowedFiles([path], lambda: read(path))


def _login(path: Path, variable: str) -> Login:
    text = read_file(path, variable).decode(errors="replace").strip()
    user, colon, password = text.partition(":")
    if not (user and colon and password) or "\n" in text:
        raise WrongSettings(f"{variable} {path}: this must be one line, user:password")
    return Login(user, password)


def _credentials(path: Path) -> Credentials:
    where = f"{NATS_CREDENTIALS} {path}"
    lines = read_file(path, NATS_CREDENTIALS).splitlines()
    parts = {
        kind: lines[at + 1].strip()
        for at, line in enumerate(lines[:-1])
        for kind in (b"USER JWT", b"USER NKEY SEED")
        if b"BEGIN" in line and kind in line
    }
    if len(parts) < 2:
        raise WrongSettings(f"{where}: this is not a NATS credentials file; `nsc generate creds` writes one")
    return Credentials(parts[b"USER JWT"], _key(parts[b"USER NKEY SEED"], where))


def _key(text: bytes, where: str) -> Nkey:
    """Source: https://docs.nats.io/running-a-nats-service/configuration/securing_nats/auth_intro/nkey_auth."""
    seed = text.strip()
    try:
        raw = base64.b32decode(seed + b"=" * (-len(seed) % 8))
    except binascii.Error:
        raw = b""
    # two bytes of types, 32 of the seed, two of a checksum
    is_user = len(raw) == 36 and raw[0] & 0xF8 == _SEED and ((raw[0] & 7) << 5 | raw[1] >> 3) == _USER
    if not is_user or binascii.crc_hqx(raw[:-2], 0).to_bytes(2, "little") != raw[-2:]:
        raise WrongSettings(
            f"{where}: this is not the seed of a NATS user; it begins with SU, and `nk -gen user` writes one"
        )
    private = Ed25519PrivateKey.from_private_bytes(raw[2:-2])
    public = bytes([_USER]) + private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    return Nkey(_base32(public), lambda nonce: base64.b64encode(private.sign(nonce.encode())))


def _base32(data: bytes) -> str:
    return base64.b32encode(data + binascii.crc_hqx(data, 0).to_bytes(2, "little")).decode().rstrip("=")
