"""A certificate and its key, tried out before a server needs them."""

import ssl
from typing import NamedTuple

from components.startup import WrongSettings


class Tls(NamedTuple):
    """PEM files."""

    certificate: str  # and those that vouch for it
    key: str


def tls_context(tls: Tls) -> ssl.SSLContext:
    """A server's context for TLS 1.2 and 1.3. Raises: WrongSettings, naming the files and what is wrong with them."""
    for option, path in (("--tls-cert", tls.certificate), ("--tls-key", tls.key)):
        try:
            with open(path, "rb"):  # noqa: PTH123 - only whether it can be read
                pass
        except OSError as exc:
            raise WrongSettings(f"{option} {path}: {exc.strerror}") from exc
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(tls.certificate, tls.key)
    except (OSError, ValueError) as exc:  # OpenSSL says little: "[SSL] PEM lib" for a key in place of a certificate
        raise WrongSettings(
            f"cannot serve TLS with {tls.certificate} and {tls.key}: --tls-cert wants a PEM certificate, --tls-key its "
            f"private key, without a password ({_swapped(tls) or exc})"
        ) from exc
    return context


def _swapped(tls: Tls) -> str:
    """The likely cause where one file is the other one's kind."""
    with open(tls.certificate, "rb") as certificate, open(tls.key, "rb") as key:  # noqa: PTH123
        if b"PRIVATE KEY" in certificate.read() and b"CERTIFICATE" in key.read():
            return "the two files look swapped"
    return ""
