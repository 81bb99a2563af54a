from types import SimpleNamespace

import pytest

from components.discovery.book import InstanceBook
from components.errors import BackendUnavailable
from services.inspect import mesh
from services.inspect.mesh import Mesh

pytestmark = pytest.mark.anyio


async def test_planners_stay_known_while_nats_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """`inspect top` ended if NATS was away when it looked for planners, which it does every 10 s."""
    answers: list[dict[str, str] | Exception] = [
        BackendUnavailable("away"),
        {"x": "ns.planner.x"},
        BackendUnavailable("away"),
    ]

    async def planners(*_: object) -> dict[str, str]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(mesh, "planners", planners)
    monkeypatch.setattr(mesh, "PLANNERS_S", -1.0)
    seen = Mesh(SimpleNamespace(), SimpleNamespace(book=InstanceBook()), "ns")
    with pytest.raises(BackendUnavailable):
        await seen.instances()  # none are known: a command that shows the mesh once fails
    assert [one.instance_id for one in await seen.instances()] == ["x"]
    assert [one.instance_id for one in await seen.instances()] == ["x"]
    assert not answers
