from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from components.certificates import Certificates, TlsFiles
from components.startup import WrongSettings
from services.local.authority import Authority


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return Authority(tmp_path / "tls").issue("decode")


def at(files: TlsFiles, name: str) -> Path:
    path = getattr(files, name)
    assert isinstance(path, Path)
    return path


def gone(files: TlsFiles) -> TlsFiles:
    at(files, "key").unlink()
    return files


def swapped(files: TlsFiles) -> TlsFiles:
    return TlsFiles(ca=files.ca, certificate=files.key, key=files.certificate)


def of_another(files: TlsFiles) -> TlsFiles:
    other = Authority(at(files, "ca").parent / "other").issue("decode")
    return TlsFiles(ca=files.ca, certificate=files.certificate, key=other.key)


def torn(files: TlsFiles) -> TlsFiles:
    at(files, "ca").write_bytes(at(files, "ca").read_bytes()[:200])
    return files


def no_authority(files: TlsFiles) -> TlsFiles:
    return TlsFiles(ca=files.key, certificate=files.certificate, key=files.key)


def half(files: TlsFiles) -> TlsFiles:
    return TlsFiles(ca=files.ca, certificate=files.certificate)


def with_passphrase(files: TlsFiles) -> TlsFiles:
    key = load_pem_private_key(at(files, "key").read_bytes(), None)
    encrypted = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    at(files, "key").write_bytes(encrypted)
    return files


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (gone, r"MESH_TLS__KEY .*/decode\.key: No such file or directory"),
        (swapped, r"MESH_TLS__CERTIFICATE .*/decode\.key: this is not a PEM certificate"),
        (
            of_another,
            r"MESH_TLS__KEY .*/other/decode\.key: this is not the private key.* of MESH_TLS__CERTIFICATE .*MISMATCH",
        ),
        (torn, r"MESH_TLS__CA .*/ca\.pem: this certificate cannot be read"),
        (no_authority, r"MESH_TLS__CA .*/decode\.key: this is not a PEM certificate"),
        (half, "MESH_TLS__CERTIFICATE and MESH_TLS__KEY belong together"),
        (with_passphrase, r"MESH_TLS__KEY .*/decode\.key: this is not the private key, without a passphrase"),
    ],
)
def test_a_wrong_file_is_named_with_its_setting(
    files: TlsFiles, spoil: Callable[[TlsFiles], TlsFiles], error: str
) -> None:
    with pytest.raises(WrongSettings, match=error):
        Certificates(spoil(files)).current()


def test_a_renewed_certificate_is_the_current_one(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificates = Certificates(authority.issue("decode"))
    first = certificates.current()
    assert certificates.current() is first
    authority.issue("decode")
    assert certificates.current().pem.certificate != first.pem.certificate


def test_files_of_a_throw_away_authority_are_for_their_user_alone(files: TlsFiles) -> None:
    folder = at(files, "ca").parent
    assert folder.stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == dict.fromkeys(("ca.pem", "decode.pem", "decode.key"), 0o600)
