import pytest

from components.urls import Login, checked_etcd_urls, checked_http_url, checked_nats_urls, login_of, without_password


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


@pytest.mark.parametrize("urls", ["localhost", "h1:1, h2:2", "nats://a:p%2F@h1,nats://h2:4222", "[::1]:4222"])
def test_addresses_of_servers_are_taken_as_they_are(urls: str) -> None:
    assert checked_nats_urls(urls) == urls


@pytest.mark.parametrize(
    "urls",
    [
        "/var/run/nats",
        "nats://",
        "h1:4222,",
        "nats://h:port",
        "h:0",
        "[::1:4222",
        "nats://h:99999",
        "nats://a:sec/ret@h",
    ],
)
def test_an_address_that_no_server_can_have_is_refused_at_the_start(urls: str) -> None:
    """The process tried it forever, with the advice to start NATS."""
    with pytest.raises(ValueError, match=r"each address must be nats://HOST:PORT .*MESH_NATS_URL") as raised:
        checked_nats_urls(urls)
    assert ("percent-encoding" in str(raised.value)) == ("@" in urls)
    assert "ret" not in str(raised.value)


def test_an_etcd_address_without_a_host_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"each address must be http://HOST:PORT .*MESH_ETCD_URL"):
        checked_etcd_urls("http://:2379")
