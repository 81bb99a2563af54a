"""What admission knows of the mesh, and the priority that a request carries into it."""

from typing import Any

import pytest

from components.wire.heartbeat import Heartbeat
from components.wire.instances import KvEndpoint
from components.wire.layout import KvLayout
from services.frontend.ports import FleetRoom
from tests.components.discovery.records import record
from tests.services.frontend.test_mesh_client import Decode, Mesh, answers

pytestmark = pytest.mark.anyio


def registered(mesh: Mesh, name: str, page_size: int) -> None:
    layout = KvLayout(model="m", dtype="float32", page_size=page_size, layers=1, kv_heads=1, head_dim=8)
    kv = KvEndpoint(
        backend="fake",
        agent=name,
        agent_metadata="",
        base_address=0,
        num_pages=100,
        device="cpu",
        aux_address=0,
        aux_slots=1,
        aux_slot_bytes=64,
        layout=layout,
    )
    mesh.book.put(name, record(name, "1", model="m", max_context=100, kv=kv))


def says(mesh: Mesh, name: str, **counts: Any) -> None:
    mesh.decodes.record_heartbeat(Heartbeat(instance_id=name, epoch="1", step=1, busy=True, total_pages=100, **counts))


async def test_room_is_what_all_that_take_new_work_have_said() -> None:
    mesh = Mesh()
    assert mesh.client.room() == FleetRoom(0, None, 0)
    registered(mesh, "a", 16)
    assert mesh.client.room() == FleetRoom(0, 1600, 0), "a burst may come before its first heartbeat"
    says(mesh, "a", held_pages=30, num_requests=9, num_running=4, num_reserved=2, num_waiting=1)
    assert mesh.client.room() == FleetRoom(480, 1600, 3)
    registered(mesh, "b", 32)
    says(mesh, "b", held_pages=10, num_waiting=2)  # an older version numbers nothing
    assert mesh.client.room() == FleetRoom(800, 4800, 5)
    says(mesh, "a", draining=True)
    assert mesh.client.room() == FleetRoom(320, 3200, 2)


async def test_decode_is_told_the_priority() -> None:
    mesh = Mesh()
    decode = Decode(mesh, "a", answers)
    await mesh.ask(priority=-3)
    await mesh.ask()
    assert [request.priority for request in decode.requests] == [-3, 0]
