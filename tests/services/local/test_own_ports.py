"""A mesh whose frontends share a port must not share it with another mesh."""

import socket

import pytest

from bench.processes import free_port
from services.local.checks import own_ports
from services.local.child_process import CannotStart
from services.local.plan import Plan


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setenv("MESH_FRONTEND_PORT", str(free_port()))
    return Plan.read({"bootstrap": 0, "prefill": 0, "decode": 1, "frontend": 2})


def test_a_port_is_held_before_a_frontend_listens_and_free_after_the_mesh(plan: Plan) -> None:
    with (
        own_ports(plan),
        pytest.raises(CannotStart, match=rf"cannot listen on 127.0.0.1:{plan.frontend.port}: Address already"),
    ):
        own_ports(plan).__enter__()
    with own_ports(plan):
        pass


def test_a_port_that_another_process_shares_is_refused(plan: Plan) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", plan.frontend.port))
        other.listen()
        with pytest.raises(CannotStart, match="choose another with --port"):
            own_ports(plan).__enter__()


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("192.0.2.1", "this machine does not have this address; give --host one that it has"),
        ("no.such.host.invalid", r"'no\.such\.host\.invalid' is not an address or name of this machine"),
        ("a..b", r"'a\.\.b' is not an address or name of this machine; give another --host"),
    ],
)
def test_the_error_for_another_machines_address_is_not_in_use(
    host: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advice was to free it, or to give another --port."""
    monkeypatch.setenv("MESH_FRONTEND_HOST", host)
    plan = Plan.read({"bootstrap": 0, "prefill": 0, "decode": 1, "frontend": 1})
    with pytest.raises(CannotStart, match=told):
        own_ports(plan).__enter__()


def test_frontends_may_share_the_port_that_is_held_for_them(plan: Plan) -> None:
    with own_ports(plan), socket.socket() as one, socket.socket() as two:
        for listener in (one, two):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(("127.0.0.1", plan.frontend.port))
            listener.listen()
