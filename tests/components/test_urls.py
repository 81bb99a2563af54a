import pytest

from components.urls import Login, checked_http_url, login_of, without_password


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


@pytest.mark.parametrize(
    "url",
    [
        "http://jaeger:4318",
        "https://a:p%2F@h/otlp",
        "http://[::1]:4318/",
        "http://127.0.0.1",
        "HTTP://h",
        "http://bücher.de",
    ],
)
def test_an_address_of_a_web_server_is_taken_as_it_is(url: str) -> None:
    assert checked_http_url(url) == url


@pytest.mark.parametrize(
    "url",
    [
        "jaeger:4318",
        "localhost",
        "grpc://h:4317",
        "http://",
        "http://:4318",
        "http://h:abc",
        "http://h:0",
        "http://h:65536",
        "http://[::1",
        "http://a..b:1",
        "http://a b:1",
        " http://h",
        "http://h?x=1",
        "http://h#x",
        "http://a:sec/ret@h:1",
        "http://a:12/ret@h:1",
        "http://a,http://b",
    ],
)
def test_another_address_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ValueError, match="give http://HOST:PORT or https://HOST:PORT") as caught:
        checked_http_url(url)
    assert "ret" not in str(caught.value)
    assert ("such as %2F for /" in str(caught.value)) == ("@" in url)
