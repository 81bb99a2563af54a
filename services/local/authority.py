"""A temporary certificate authority for `--secure`. Its key is only in memory, so it cannot sign after this process ends.

`python -m services.local.authority FOLDER` makes one for docker-compose.secure.yml: a certificate for each role.
"""

import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from components.certificates import TlsFiles
from components.permissions import ADMINISTRATOR, ROLES

LIFE: Final = timedelta(days=365)
CLOCKS_DIFFER_BY: Final = timedelta(minutes=5)
NAMES_OF_THIS_MACHINE: Final = ("localhost", "127.0.0.1", "::1")


class Authority:
    def __init__(self, home: Path) -> None:
        """`home` is a directory for the files of certificates and keys; it may not exist yet."""
        self._home = home
        self.life = LIFE  # validity of the certificates that it signs
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named("kvmesh throw-away authority")
        self.ca = home / "ca.pem"
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        builder = self._builder(self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        of_key = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        builder = builder.add_extension(of_key, critical=False)
        self._write(self.ca, self._signed(builder))

    def issue(self, name: str, hosts: Sequence[str] = (), *, is_user: bool = True) -> TlsFiles:
        """Issue a certificate and its key, in files called `name`. If there are `hosts`, it is a server's.

        If `is_user`, its common name is `name`, which etcd and NATS take for the user; else it has none.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(_named(name) if is_user else x509.Name([]), key.public_key())
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if hosts:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False
            )
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        files = TlsFiles(ca=self.ca, certificate=self._home / f"{name}.pem", key=self._home / f"{name}.key")
        assert files.key is not None
        assert files.certificate is not None
        self._write(files.key, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        self._write(files.certificate, self._signed(builder))
        return files

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCKS_DIFFER_BY)
            .not_valid_after(now + self.life)
            # distinguishes authorities of the same name while one replaces the other and both are trusted
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )

    def _signed(self, builder: x509.CertificateBuilder) -> bytes:
        return builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)

    @staticmethod
    def _write(path: Path, content: bytes) -> None:
        new = path.with_suffix(f"{path.suffix}.new")
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # noqa: PTH123 - with a mode
            file.write(content)
        new.replace(path)  # atomic: readers see the old or the new file


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def main(folder: Path) -> None:
    authority = Authority(folder)
    for role in (*ROLES, ADMINISTRATOR):
        authority.issue(role)
    for server in ("etcd", "nats"):
        authority.issue(server, (server, *NAMES_OF_THIS_MACHINE))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m services.local.authority FOLDER")
    main(Path(sys.argv[1]))
