"""Users of the embedded servers, one for each role, created at each start."""

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from components.certificates import TlsFiles
from components.permissions import ADMINISTRATOR, ROLES
from components.settings import MeshSettings
from services.local.authority import NAMES_OF_THIS_MACHINE, Authority

S = TypeVar("S", bound=MeshSettings)

OBSERVER: Final = "observer"  # has a server certificate, but is no user of etcd or NATS
GATEWAY: Final = "gateway"  # has a certificate without a user, because etcd's JSON gateway refuses those of users


@dataclass(frozen=True, slots=True)
class Accounts:
    """The users. Each has a password, or a certificate if there is an authority."""

    namespace: str = "kvmesh"
    roles: Mapping[str, str] = field(default_factory=dict)  # by user
    passwords: Mapping[str, str] = field(default_factory=lambda: {ADMINISTRATOR: secrets.token_urlsafe(24)})
    certificates: Mapping[str, TlsFiles] = field(default_factory=dict)  # by user; of the servers: by their name

    @property
    def are_secure(self) -> bool:
        return bool(self.certificates)

    @classmethod
    def make(
        cls, namespace: str, frontends: int, authority_home: Path | None = None, observer_host: str = "127.0.0.1"
    ) -> Self:
        """`authority_home` is for certificates, whose users need no passwords."""
        roles = {role: role for role in ROLES if role != "frontend"}
        roles |= {f"frontend-{i}": "frontend" for i in range(frontends)}  # one each: none may read another's answers
        users = (*roles, ADMINISTRATOR)
        if authority_home is None:
            return cls(namespace, roles, {user: secrets.token_urlsafe(24) for user in users})
        authority = Authority(authority_home)
        certificates = {user: authority.issue(user) for user in users}
        certificates[GATEWAY] = authority.issue(GATEWAY, is_user=False)
        certificates |= {server: authority.issue(server, NAMES_OF_THIS_MACHINE) for server in ("etcd", "nats")}
        hosts = dict.fromkeys((*NAMES_OF_THIS_MACHINE, observer_host))
        certificates[OBSERVER] = authority.issue(OBSERVER, tuple(hosts), is_user=False)
        return cls(namespace, roles, {}, certificates)


@dataclass(frozen=True, slots=True)
class Backends:
    """How a user reaches etcd and NATS."""

    etcd_url: str
    nats_url: str
    nats_name: str | None = None
    tls: TlsFiles | None = None

    def settings(self) -> dict[str, Any]:
        """Values of settings, for `running.json` and for this process."""
        found: dict[str, Any] = {"etcd_url": self.etcd_url, "nats_url": self.nats_url}
        if self.nats_name is not None:
            found["nats_name"] = self.nats_name
        if self.tls is not None:
            found["tls"] = {name: str(path) for name, path in self.tls if path is not None}
        return found

    def applied(self, settings: S) -> S:
        tls = {} if self.tls is None else {"tls": self.tls}
        return settings.model_copy(update={**self.settings(), **tls})

    def variables(self) -> dict[str, str]:
        settings = self.settings()
        tls: Iterable[tuple[str, str]] = settings.pop("tls", {}).items()
        return {f"MESH_{name.upper()}": value for name, value in settings.items()} | {
            f"MESH_TLS__{name.upper()}": path for name, path in tls
        }


Reach = Callable[[str], Backends]  # user → how it reaches etcd and NATS


def user_of(role: str, number: int) -> str:
    """The user of a child. Each frontend has its own; workers of a role share one, since more may be added."""
    return f"frontend-{number}" if role == "frontend" else role
