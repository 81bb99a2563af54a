import pytest

from components.urls import Login, login_of, without_password


@pytest.mark.parametrize(
    ("urls", "shown"),
    [
        ("nats://a:secret@h:4222", "nats://h:4222"),
        ("http://a:secret@h1:1,http://b:secret%40@h2:2", "http://h1:1,http://h2:2"),
        ("nats://secret@h:4222, nats://a:secret@h2", "nats://h:4222, nats://h2"),
        ("a:secret@h:2379", "h:2379"),
        ("http://a:sec/ret@h", "http://h"),
        ("http://a:sec@ret@h", "http://h"),
        ("h1:1,h2:2", "h1:1,h2:2"),
        ("http://[::1]:2379", "http://[::1]:2379"),
    ],
)
def test_an_address_is_shown_without_its_password(urls: str, shown: str) -> None:
    assert without_password(urls) == shown


@pytest.mark.parametrize(
    ("urls", "login"),
    [
        ("nats://h1:1,nats://a:p%40%2Fss@h2", Login("a", "p@/ss")),
        ("nats://token@h", Login("token", None)),
        ("a:b@h:2379", Login("a", "b")),
        ("nats://h", Login(None, None)),
    ],
)
def test_the_login_is_that_of_the_first_address_with_one(urls: str, login: Login) -> None:
    assert login_of(urls) == login
