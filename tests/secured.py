"""KVMESH_TEST_SECURE=1: the shared etcd and NATS have users with the rights of their roles, and speak TLS alone.

Each process of a mesh has the login of its role; the test itself is the administrator. All trust the run's authority by
variables of OpenSSL and gRPC.
"""

import json
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from components.certificates import Certificates, TlsFiles
from components.credentials import EtcdAccess
from components.discovery.etcd import etcd_client
from components.discovery.etcd_users import admit
from services.local.accounts import Accounts, Backends, Reach
from services.local.authority import NAMES_OF_THIS_MACHINE, Authority
from services.local.servers import ETCD, HOST, NATS, Kind, Site, _ask

SECURED: Final = os.environ.get("KVMESH_TEST_SECURE", "") not in {"", "0"}
FRONTENDS: Final = 24  # of one mesh, including restarted ones


@dataclass(frozen=True, slots=True)
class Secured:
    """The accounts and the authority of one run."""

    accounts: Accounts
    files: TlsFiles  # of the servers

    @classmethod
    def make(cls, home: Path) -> "Secured":
        files = Authority(home).issue("server", NAMES_OF_THIS_MACHINE)
        os.environ["SSL_CERT_FILE"] = os.environ["GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"] = str(files.ca)
        return cls(Accounts.make("*", FRONTENDS), files)

    def kind(self, plain: Kind) -> Kind:
        """Return a kind of server with TLS and passwords."""
        if plain is NATS:
            return replace(NATS, scheme="tls", command=self._nats)
        context = partial(ssl.create_default_context, cafile=str(self.files.ca))
        return replace(ETCD, scheme="https", command=self._etcd, identity=partial(_identity, context), lock=self._lock)

    def reach(self, etcd: str, nats: str, namespace: str) -> Reach:
        """Give the users of a mesh their rights, and return their logins. `etcd`, `nats`: the administrator's addresses."""
        with etcd_client(etcd) as client:
            admit(client, namespace, self.accounts.roles, self.accounts.passwords)

        def of(user: str) -> Backends:
            password = self.accounts.passwords[user]
            return Backends(_with_login(etcd, user, password), _with_login(nats, user, password), user)

        return of

    def _nats(self, site: Site) -> list[str]:
        command = NATS.command(site)
        config = site.home / "nats.conf"
        files = {"cert_file": self.files.certificate, "key_file": self.files.key}
        lines = ", ".join(f"{name}: {json.dumps(str(path))}" for name, path in files.items())
        config.write_text(f"{config.read_text()}tls {{ {lines} }}\n")
        return command

    def _etcd(self, site: Site) -> list[str]:
        plain = f"http://{HOST}:{site.port}"
        command = [part.replace(plain, plain.replace("http:", "https:")) for part in ETCD.command(site)]
        return [*command, f"--cert-file={self.files.certificate}", f"--key-file={self.files.key}"]

    def _lock(self, site: Site) -> None:
        access = EtcdAccess(Certificates(TlsFiles(ca=self.files.ca)))
        with etcd_client(f"https://{HOST}:{site.port}", access) as client:
            admit(client, site.accounts.namespace, site.accounts.roles, site.accounts.passwords)


def _identity(context: Callable[[], ssl.SSLContext], site: Site) -> str:
    answer = json.loads(_ask(site.port, "POST", "/v3/cluster/member/list", context()))
    return str(answer["members"][0]["name"])


_of_this_run: list[Secured] = []


def secured(home: Path) -> Secured:
    """Return the one of this run, made at the first call."""
    if not _of_this_run:
        _of_this_run.append(Secured.make(home))
    return _of_this_run[0]


def _with_login(url: str, user: str, password: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{user}:{password}@{rest.rpartition('@')[2]}"


def reach_of(etcd: str, nats: str, namespace: str) -> Reach | None:
    """Return the logins of a mesh over the run's secured servers; None for other servers."""
    if not (SECURED and _of_this_run) or not (etcd.startswith("https:") and nats.startswith("tls:")):
        return None
    return _of_this_run[0].reach(etcd, nats, namespace)
