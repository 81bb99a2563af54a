import base64
from pathlib import Path

import pytest

from components.credentials import NATS_LOGIN, NatsAccess, credentials_file, login_file, nkey_file
from components.startup import WrongSettings

# of the documentation of NATS
SEED = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY"
PUBLIC = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4"


def test_a_login_may_have_colons_in_its_password_and_a_line_end(tmp_path: Path) -> None:
    path = tmp_path / "login"
    path.write_text("decode:a:b/c@d\n")
    followed = login_file(path, NATS_LOGIN)
    assert followed is not None
    assert followed.current() == ("decode", "a:b/c@d")


@pytest.mark.parametrize("text", ["", "sk-secret", ":sk-secret", "decode:", "a:sk-secret\nb:c"])
def test_a_login_that_cannot_be_used_is_named_and_not_quoted(tmp_path: Path, text: str) -> None:
    path = tmp_path / "login"
    path.write_text(text)
    with pytest.raises(
        WrongSettings, match=r"MESH_NATS_LOGIN_FILE .*/login: this must be one line, user:pass"
    ) as raised:
        NatsAccess(login=login_file(path, NATS_LOGIN)).check()
    assert "secret" not in str(raised.value)


def test_a_seed_gives_the_public_key_and_a_signature(tmp_path: Path) -> None:
    path = tmp_path / "seed"
    path.write_text(f"{SEED}\n")
    followed = nkey_file(path)
    assert followed is not None
    key = followed.current()
    assert key.public == PUBLIC
    assert len(base64.b64decode(key.sign("nonce"))) == 64


@pytest.mark.parametrize("text", ["", "SUA", PUBLIC, SEED[:-1] + "A", SEED.replace("SU", "SA", 1), "?!"])
def test_a_seed_that_cannot_be_used_is_named_and_not_quoted(tmp_path: Path, text: str) -> None:
    path = tmp_path / "seed"
    path.write_text(text)
    with pytest.raises(
        WrongSettings, match=r"MESH_NATS_NKEY_FILE .*/seed: this is not the seed of a NATS user"
    ) as raised:
        NatsAccess(key=nkey_file(path)).check()
    assert not text or text not in str(raised.value)


def test_a_credentials_file_without_both_parts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "user.creds"
    path.write_text(f"-----BEGIN USER NKEY SEED-----\n{SEED}\n------END USER NKEY SEED------\n")
    with pytest.raises(
        WrongSettings, match=r"MESH_NATS_CREDENTIALS_FILE .*user\.creds: this is not a NATS credentials file"
    ):
        NatsAccess(credentials=credentials_file(path)).check()


def test_two_proofs_are_one_too_many(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("a:b")
    access = NatsAccess(login=login_file(path, NATS_LOGIN), key=nkey_file(path))
    with pytest.raises(WrongSettings, match="MESH_NATS_LOGIN_FILE and MESH_NATS_NKEY_FILE: give one of them"):
        access.check()
