"""A mesh whose frontends share a port must not come to share it with another mesh's."""

import socket
from dataclasses import replace

import pytest

from services.local.plan import Plan
from services.local.process import CannotStart
from services.local.readiness import own_ports


@pytest.fixture
def plan() -> Plan:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Plan({"bootstrap": 0, "prefill": 0, "decode": 1, "frontend": 2}, port=probe.getsockname()[1])


def test_a_port_is_one_mesh_s_while_nobody_listens_yet_and_free_again_after_it(plan: Plan) -> None:
    with (
        own_ports(plan),
        pytest.raises(CannotStart, match=rf"cannot listen on 127.0.0.1:{plan.port}: Address already"),
    ):
        own_ports(plan).__enter__()
    with own_ports(plan):
        pass


def test_a_port_that_others_share_already_is_refused(plan: Plan) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", plan.port))
        other.listen()
        with pytest.raises(CannotStart, match="choose another with --port"):
            own_ports(plan).__enter__()


def test_an_address_of_another_machine_is_not_said_to_be_in_use() -> None:
    """It said: free it, or give another --port."""
    plan = Plan({"bootstrap": 0, "prefill": 0, "decode": 1, "frontend": 1}, host="192.0.2.1")
    with pytest.raises(CannotStart, match="this machine does not have this address: give --host one that it has"):
        own_ports(plan).__enter__()
    with pytest.raises(CannotStart, match=r"'no\.such\.host\.invalid' is no address of this machine"):
        own_ports(replace(plan, host="no.such.host.invalid")).__enter__()


def test_frontends_may_share_the_port_that_is_held_for_them(plan: Plan) -> None:
    with own_ports(plan), socket.socket() as one, socket.socket() as two:
        for listener in (one, two):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(("127.0.0.1", plan.port))
            listener.listen()
