import asyncio

import grpc
import pytest

from components.discovery.etcd import DatabaseFull, Endpoint, endpoints, etcd_errors
from components.discovery.etcd_stubs import etcd3
from components.discovery.registry import join_registry
from components.errors import BackendUnavailable
from components.startup import WrongSettings
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:2379", [("127.0.0.1", 2379)]),
        ("http://etcd", [("etcd", 2379)]),
        ("etcd:1", [("etcd", 1)]),
        ("etcd", [("etcd", 2379)]),
        ("http://a:1, http://b:2/,c:3", [("a", 1), ("b", 2), ("c", 3)]),
        ("http://[::1]:2379", [("::1", 2379)]),
    ],
)
def test_endpoints_are_read_from_one_comma_separated_list(url: str, expected: list[tuple[str, int]]) -> None:
    assert [(host, port) for host, port, *_ in endpoints(url)] == expected


@pytest.mark.parametrize("bad", ["", "http://", "http://:2379", "a:port", "a:99999", "http://[::1"])
def test_a_bad_endpoint_is_named(bad: str) -> None:
    with pytest.raises(WrongSettings, match=r"etcd endpoint .* is not http://host:port") as raised:
        endpoints(f"http://good:1,{bad}")
    assert repr(bad) in str(raised.value)


def test_a_bad_address_fails_at_once_instead_of_in_a_thread() -> None:
    """The mirror's thread ended, and the process waited for its first range forever."""

    async def test() -> None:
        async with asyncio.timeout(PATIENCE_S), join_registry("http://etcd:port", "ns", 2):
            raise AssertionError

    with pytest.raises(WrongSettings, match="etcd:port"):
        asyncio.run(test())


@pytest.mark.parametrize(
    ("error", "cause"),
    [(etcd3.exceptions.ConnectionFailedError(), "connection"), (grpc.RpcError(), "RpcError")],
)
def test_errors_of_etcd_name_address_cause_and_remedy(error: Exception, cause: str) -> None:
    message = rf"etcd at http://e:1 cannot be reached \(.*{cause}.*\): start one"
    with pytest.raises(BackendUnavailable, match=message), etcd_errors("http://e:1"):
        raise error


class _Full(grpc.RpcError):  # type: ignore[misc]
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.RESOURCE_EXHAUSTED

    def details(self) -> str:
        return "etcdserver: mvcc: database space exceeded"


def test_a_full_etcd_is_not_called_unreachable() -> None:
    """Logs and `inspect doctor` reported an unreachable etcd, while it could be read."""
    message = r"^etcd at http://e:1 is full .*etcdctl compact"
    with pytest.raises(DatabaseFull, match=message), etcd_errors("http://e:1"):
        raise _Full


@pytest.mark.parametrize("bad", ["https://etcd:2379", "https://user:secret@etcd", "http://secret@etcd", "grpc://etcd"])
def test_an_endpoint_that_alone_wants_tls_or_half_a_login_is_refused_instead_of_used_in_the_clear(bad: str) -> None:
    with pytest.raises(WrongSettings, match="MESH_ETCD_URL") as raised:
        endpoints(f"http://good:1,{bad}")
    assert "secret" not in str(raised.value)


def test_each_endpoint_has_its_own_user_and_password() -> None:
    assert endpoints("http://a:1, http://b:p%40ss@h,[::1]:2") == [
        Endpoint("a", 1, None, None),
        Endpoint("h", 2379, "b", "p@ss"),
        Endpoint("::1", 2, None, None),
    ]
